"""The samples and demonstrations of an update, and the per-token numbers of their micro-batches. Pure numpy.

Position t of each array belongs to token t of the sequence: the prompt, then the response.
Legend of shapes: B sequences of a micro-batch, S padded positions.

Invariants:
- The mask holds only response tokens of samples that are not masked. [test_microbatch: masked_samples_and_fillers]
- Every array is 0 outside the responses. [test_microbatch: at_the_position_of_its_token]
- A filler's mask is empty, so its weight is 0. [test_microbatch: masked_samples_and_fillers]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.megatron.batching import ALONE, Limits, MicroBatchPlan, ReplicaPlace, TokenBatch, plan_micro_batches

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One response to learn from. Each tuple of log-probabilities has one value per response token."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    advantage: float
    old_log_probs: tuple[float, ...]
    """From Megatron's forward pass with the weights of the version that sampled the response."""
    reference_log_probs: tuple[float, ...]
    """From the reference policy. Empty where the job has none."""
    engine_log_probs: tuple[float, ...]
    """From the engine, reported when it sampled the response."""
    masked: bool = False
    """Whether the sample is left out of the loss, because the length limit cut its response."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens or not self.response_tokens:
            raise ValueError(
                f"a sample of {len(self.prompt_tokens)} prompt and {len(self.response_tokens)} response tokens cannot "
                "be trained: it needs at least one of each"
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
    """A sequence to imitate. The loss covers the tokens whose mask entry is True."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.loss_mask) or len(self.tokens) < 2:
            raise ValueError(
                f"a demonstration of {len(self.tokens)} tokens with {len(self.loss_mask)} mask entries cannot be "
                "trained: it needs at least two tokens, and a mask entry for each"
            )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """A micro-batch with the per-token numbers that its loss needs."""

    batch: TokenBatch
    mask_BS: FloatArray
    token_weight_BS: FloatArray
    """The weight of each token in the update's loss, before the minibatch's scale."""
    advantage_BS: FloatArray
    old_log_probs_BS: FloatArray
    reference_log_probs_BS: FloatArray
    engine_log_probs_BS: FloatArray


def packed_samples(samples: Sequence[TrainSample], limits: Limits, place: ReplicaPlace = ALONE) -> MicroBatchPlan:
    """The packing of an update's samples into micro-batches. Raises SampleOverCap."""
    return plan_micro_batches([len(sample.tokens) for sample in samples], limits, place)


def train_batches(
    samples: Sequence[TrainSample], token_weights: Sequence[float], packing: MicroBatchPlan
) -> list[TrainBatch]:
    """One replica's micro-batches of these samples. `token_weights[i]` is the weight of each token of sample i."""
    batches = packing.own([sample.tokens for sample in samples])
    return [train_batch(samples, token_weights, batch) for batch in batches]


def train_batch(samples: Sequence[TrainSample], token_weights: Sequence[float], batch: TokenBatch) -> TrainBatch:
    """The per-token numbers of a micro-batch. `samples` and `token_weights` are those of the whole portion."""
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
