"""Cuts sequences into right-padded micro-batches and deals them to the data-parallel replicas. Pure numpy.

Order: `cut` (which sequences go together), `deal` (which replica runs them), `pad` (the tokens). Invariants: the cut
does not depend on the number of replicas; every sequence is in exactly one micro-batch; all replicas get equally many
micro-batches, short ones a filler that holds no sequence; the same lengths give the same micro-batches, bit for bit.
Legend of shapes: B sequences of a micro-batch, S padded positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FILLER_LENGTH = 2
"""Positions of a filler: the fewest of which one has a log-probability."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a micro-batch may be; a sequence longer than `max_tokens` goes alone."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    pad_multiple: int = 8
    """Padded lengths are multiples of this, so that few shapes occur."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens", "pad_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"batch limit {name}={value} must be at least 1")


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch. `sequences` are indices into what was cut, one a row; rows after them are zeros."""

    sequences: tuple[int, ...]
    tokens_BS: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens_BS.shape[0], self.tokens_BS.shape[1]


def cut(lengths: Sequence[int], limits: BatchLimits) -> list[tuple[int, ...]]:
    """Indices of the sequences of each micro-batch: the longest first, equal lengths in the given order."""
    batches: list[tuple[int, ...]] = []
    open_batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if open_batch and not _fits(len(open_batch) + 1, padded_length(lengths[open_batch[0]], limits), limits):
            batches.append(tuple(open_batch))
            open_batch = []
        open_batch.append(index)
    return [*batches, tuple(open_batch)] if open_batch else batches


def deal(batches: Sequence[tuple[int, ...]], *, num_replicas: int, replica: int) -> list[tuple[int, ...]]:
    """The micro-batches of one replica, every `num_replicas`-th, filled up with empty ones to the common number."""
    own = list(batches[replica::num_replicas])
    return own + [()] * (math.ceil(len(batches) / num_replicas) - len(own))


def pad(sequences: Sequence[Sequence[int]], batch: tuple[int, ...], limits: BatchLimits) -> TokenBatch:
    """The tokens of a micro-batch, one sequence a row, zeros after its end."""
    if not batch:
        return TokenBatch((), np.zeros((1, padded_length(FILLER_LENGTH, limits)), dtype=np.int64))
    length = padded_length(max(len(sequences[index]) for index in batch), limits)
    tokens_BS = np.zeros((len(batch), length), dtype=np.int64)
    for row, index in enumerate(batch):
        tokens_BS[row, : len(sequences[index])] = sequences[index]
    return TokenBatch(batch, tokens_BS)


def replica_batches(
    sequences: Sequence[Sequence[int]],
    limits: BatchLimits,
    *,
    num_replicas: int,
    replica: int,
    num_shards: int | None = None,
    alike: bool = False,
) -> list[TokenBatch]:
    """`cut`, `deal` and `pad`: the micro-batches that one replica runs.

    They are dealt to `num_shards` logical shards, of which each replica runs equally many that follow one another, one
    after the other; None: one a replica. `alike` gives the n-th micro-batch of every replica one shape, with rows and
    positions of zeros: ranks that share experts out exchange tokens by equal parts.
    """
    batches = cut([len(tokens) for tokens in sequences], limits)
    num_own = (num_shards or num_replicas) // num_replicas

    def run_by(replica: int) -> list[TokenBatch]:
        shards = range(replica * num_own, (replica + 1) * num_own)
        dealt = (deal(batches, num_replicas=num_replicas * num_own, replica=shard) for shard in shards)
        return [pad(sequences, batch, limits) for shard in dealt for batch in shard]

    own = run_by(replica)
    if not alike:
        return own
    together = zip(*(run_by(other) for other in range(num_replicas)), strict=True)
    return [_widened(batch, [other.shape for other in same]) for batch, same in zip(own, together, strict=True)]


def padded_length(length: int, limits: BatchLimits) -> int:
    return math.ceil(length / limits.pad_multiple) * limits.pad_multiple


def _widened(batch: TokenBatch, shapes: Sequence[tuple[int, int]]) -> TokenBatch:
    tokens_BS = np.zeros(np.max(shapes, axis=0), dtype=np.int64)
    tokens_BS[: batch.shape[0], : batch.shape[1]] = batch.tokens_BS
    return TokenBatch(batch.sequences, tokens_BS)


def _fits(num_sequences: int, length: int, limits: BatchLimits) -> bool:
    sequences_fit = limits.max_sequences is None or num_sequences <= limits.max_sequences
    return sequences_fit and (limits.max_tokens is None or num_sequences * length <= limits.max_tokens)
