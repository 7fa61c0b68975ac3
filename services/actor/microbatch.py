"""The samples and demonstrations of an update, and the per-token numbers of their micro-batches. Pure numpy.

Each array is aligned to the token that it is about: position t speaks of token t of the sequence (prompt, then
response). Invariants: only response tokens of samples that are not masked are in the mask; what is outside a response
is 0 in every array; a filler's mask is empty, so that it weighs nothing.
Legend of shapes: B sequences of a micro-batch, S padded positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.megatron.batching import ALONE, Limits, Packed, ReplicaPlace, TokenBatch, packed

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One response to learn from. The log-probabilities are one a response token, by the version that sampled it."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    advantage: float
    old_log_probs: tuple[float, ...]
    """Recomputed by the trainer's own forward."""
    reference_log_probs: tuple[float, ...]
    """By the reference policy; empty where there is none."""
    engine_log_probs: tuple[float, ...]
    """As the engine reported them when it sampled."""
    masked: bool = False
    """The length limit cut the response, and it takes no part in the loss."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens or not self.response_tokens:
            raise ValueError(
                f"a sample of {len(self.prompt_tokens)} prompt and {len(self.response_tokens)} response tokens cannot "
                "be trained: it needs one of each at least"
            )
        for name in ("old_log_probs", "reference_log_probs", "engine_log_probs"):
            count = len(getattr(self, name))
            if count != len(self.response_tokens) and not (name == "reference_log_probs" and count == 0):
                raise ValueError(f"sample has {count} {name} for {len(self.response_tokens)} response tokens")

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt_tokens + self.response_tokens

    @property
    def num_trained_tokens(self) -> int:
        return 0 if self.masked else len(self.response_tokens)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A sequence to imitate: the loss is over the tokens whose mask is True."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.loss_mask) or len(self.tokens) < 2:
            raise ValueError(
                f"a demonstration of {len(self.tokens)} tokens with {len(self.loss_mask)} mask entries cannot be "
                "trained: it needs two tokens at least and a mask entry for each"
            )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """A micro-batch with all that its loss needs."""

    batch: TokenBatch
    mask_BS: FloatArray
    token_weight_BS: FloatArray
    """The weight of each token in the update's loss, the global denominator included."""
    advantage_BS: FloatArray
    old_log_probs_BS: FloatArray
    reference_log_probs_BS: FloatArray
    engine_log_probs_BS: FloatArray


def packed_samples(samples: Sequence[TrainSample], limits: Limits, place: ReplicaPlace = ALONE) -> Packed:
    """Which samples of an update go together. Raises SampleOverCap."""
    return packed([len(sample.tokens) for sample in samples], limits, place)


def train_batches(samples: Sequence[TrainSample], token_weights: Sequence[float], together: Packed) -> list[TrainBatch]:
    """One replica's micro-batches of an update; `token_weights[i]` is the weight of each token of sample i."""
    batches = together.own([sample.tokens for sample in samples])
    return [train_batch(samples, token_weights, batch) for batch in batches]


def train_batch(samples: Sequence[TrainSample], token_weights: Sequence[float], batch: TokenBatch) -> TrainBatch:
    """What the loss needs of the samples that are in a micro-batch."""
    mask_BS, weight_BS, advantage_BS, old_BS, reference_BS, engine_BS = np.zeros((6, *batch.shape), dtype=np.float32)
    for row, index in enumerate(batch.sequences):
        sample = samples[index]
        if sample.masked:
            continue
        response = slice(len(sample.prompt_tokens), len(sample.tokens))
        mask_BS[row, response] = 1.0
        weight_BS[row, response] = token_weights[index]
        advantage_BS[row, response] = sample.advantage
        old_BS[row, response] = sample.old_log_probs
        engine_BS[row, response] = sample.engine_log_probs
        if sample.reference_log_probs:
            reference_BS[row, response] = sample.reference_log_probs
    return TrainBatch(batch, mask_BS, weight_BS, advantage_BS, old_BS, reference_BS, engine_BS)
