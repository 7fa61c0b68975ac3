"""Draws each sequence's next token from its logits. A draw depends only on the logits, the seed and the position.

The position is the token's index in the response. The uniform number comes from Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC11), with the seed as key and the position as counter. It needs no state, so a
sequence may continue in another engine. The drawn token is the first whose cumulative probability exceeds the uniform
number. top_p renormalises the smallest set of likeliest tokens that reaches top_p. Log-probabilities always refer to
the whole distribution.

Shapes: N sequences, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engine import SamplingParams

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
NUM_ROUNDS = 10
LOW_32 = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling of one sequence's token, at `position` of its response."""

    sampling: SamplingParams
    position: int


@torch.inference_mode()
def draw_tokens(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """A token and its log-probability for each row."""
    device = logits_NV.device
    temperatures_N = torch.tensor([draw.sampling.temperature or 1.0 for draw in draws], device=device)
    log_probs_NV = (logits_NV / temperatures_N.unsqueeze(1)).log_softmax(dim=-1)
    greedy_N = torch.tensor([draw.sampling.temperature == 0 for draw in draws], device=device)
    tokens_N = torch.where(greedy_N, logits_NV.argmax(dim=-1), _invert(log_probs_NV, draws))
    chosen_N = log_probs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
    return tokens_N.tolist(), chosen_N.tolist()


def _invert(log_probs_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    probs_NV = log_probs_NV.double().exp()
    for row, draw in enumerate(draws):
        if draw.sampling.top_p < 1:
            probs_NV[row] = _nucleus(probs_NV[row], draw.sampling.top_p)
    cumulative_NV = probs_NV.cumsum(dim=-1)
    seeds = np.array([draw.sampling.seed for draw in draws], dtype=np.uint64)
    positions = np.array([draw.position for draw in draws], dtype=np.uint64)
    uniforms_N = torch.from_numpy(uniforms(seeds, positions)).to(probs_NV.device)
    targets_N = uniforms_N * cumulative_NV[:, -1]
    # Clamp for logits of NaN, where no comparison is true: the trainer's guard reports them.
    return (cumulative_NV <= targets_N.unsqueeze(1)).sum(dim=-1).clamp(max=probs_NV.shape[1] - 1)


def _nucleus(probs_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all tokens outside the smallest set of likeliest ones that reaches top_p.

    Of equals, lower ids come first."""
    ordered_V, order_V = probs_V.sort(descending=True, stable=True)
    before_V = ordered_V.cumsum(dim=-1) - ordered_V
    return torch.zeros_like(probs_V).scatter(0, order_V, torch.where(before_V < top_p, ordered_V, 0.0))


def uniforms(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """One number u in [0, 1) for each pair, in steps of 2**-52, so that u * total rounds to less than total."""
    zeros = np.zeros_like(seeds)
    high, low, _, _ = philox4x32(
        counter=(positions & LOW_32, positions >> SHIFT_32, zeros, zeros), key=(seeds & LOW_32, seeds >> SHIFT_32)
    )
    return ((high << np.uint64(20)) | (low >> np.uint64(12))).astype(np.float64) * 2.0**-52


def philox4x32(
    *, counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 on arrays of 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product_0, product_1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product_1 >> SHIFT_32) ^ c1 ^ k0, product_1 & LOW_32
        c2, c3 = (product_0 >> SHIFT_32) ^ c3 ^ k1, product_0 & LOW_32
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW_32, (k1 + KEY_STEPS[1]) & LOW_32
    return c0, c1, c2, c3
