"""Cuts sequences into right-padded micro-batches and assigns them to the data-parallel replicas. Pure numpy.

Order:
1. `cut` decides which sequences go together, and `deal` which replica runs them. Under a token cap `pack` does both.
2. `pad` makes the tokens.

Invariants:
- The sequences of a micro-batch do not depend on the number of replicas. Under a token cap this needs logical shards.
- Every sequence is in exactly one micro-batch.
- All replicas get equally many micro-batches. A short replica gets fillers without sequences.
- The same lengths give the same micro-batches, bit for bit.

Legend of shapes: B sequences of a micro-batch, S padded positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tidegate.megatron.packing import PAD_MULTIPLE, Packing, TokenCap, pack

FILLER_LENGTH = 2
"""The positions of a filler: the fewest with a log-probability."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a micro-batch. A sequence longer than `max_tokens` goes alone."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    pad_multiple: int = PAD_MULTIPLE

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens", "pad_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"batch limit {name}={value} must be at least 1")


Limits = BatchLimits | TokenCap
"""BatchLimits are filled with the longest sequences first, as far as they go. A TokenCap is filled evenly."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The replica whose micro-batches are requested, and the rules that hold between replicas."""

    replica: int = 0
    num_replicas: int = 1
    num_shards: int | None = None
    """Logical shards. Each replica runs equally many consecutive ones, one after another. None: one per replica."""
    alike: bool = False
    """The n-th micro-batches of all replicas have one shape, filled with rows and positions of zeros.

    Ranks that divide experts among themselves need this: they exchange tokens in equal parts.
    """
    multiple: int = 1
    """The schedule runs this many micro-batches at a time. Under a token cap their number is a multiple, so no fillers
    are needed.
    """


ALONE = ReplicaPlace()
"""The place of the only replica."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch. `sequences` are indices of the input sequences, one per row. Further rows are zeros."""

    sequences: tuple[int, ...]
    tokens_BS: npt.NDArray[np.int64]
    lengths: tuple[int, ...] | None = None
    """The numbers of tokens of the first rows, where the model runs them without padding. None: it runs the
    padded rows.
    """
    shard: int | None = None
    """The logical shard to whose gradients this one is added. None where there are no logical shards."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens_BS.shape[0], self.tokens_BS.shape[1]


def cut(lengths: Sequence[int], limits: BatchLimits) -> list[tuple[int, ...]]:
    """Indices of the sequences of each micro-batch: the longest first, equal lengths in the input's order."""
    batches: list[tuple[int, ...]] = []
    open_batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if open_batch and not _fits(len(open_batch) + 1, padded_length(lengths[open_batch[0]], limits), limits):
            batches.append(tuple(open_batch))
            open_batch = []
        open_batch.append(index)
    return [*batches, tuple(open_batch)] if open_batch else batches


def deal(batches: Sequence[tuple[int, ...]], *, num_replicas: int, replica: int) -> list[tuple[int, ...]]:
    """The micro-batches of one replica: every `num_replicas`-th, with empty ones up to the common number."""
    own = list(batches[replica::num_replicas])
    return own + [()] * (math.ceil(len(batches) / num_replicas) - len(own))


def pad(sequences: Sequence[Sequence[int]], batch: tuple[int, ...], limits: Limits) -> TokenBatch:
    """The tokens of a micro-batch, one sequence per row, with zeros after its end."""
    is_thd = isinstance(limits, TokenCap) and limits.packing is Packing.THD
    if not batch:
        filler_1S = np.zeros((1, padded_length(FILLER_LENGTH, limits)), dtype=np.int64)
        return TokenBatch((), filler_1S, (FILLER_LENGTH,) if is_thd else None)
    length = padded_length(max(len(sequences[index]) for index in batch), limits)
    tokens_BS = np.zeros((len(batch), length), dtype=np.int64)
    for row, index in enumerate(batch):
        tokens_BS[row, : len(sequences[index])] = sequences[index]
    return TokenBatch(batch, tokens_BS, tuple(len(sequences[index]) for index in batch) if is_thd else None)


@dataclass(frozen=True, slots=True)
class Filling:
    """How full the micro-batches of all replicas are."""

    num_batches: int
    """The micro-batches of one replica, rounded up."""
    padding: float
    """The share of all positions that hold no token."""
    num_positions: int
    """The positions of all micro-batches of all replicas."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The sequences that go together in the micro-batches of all replicas."""

    lengths: tuple[int, ...]
    limits: Limits
    place: ReplicaPlace
    shares: list[list[tuple[int, ...]]]
    """The micro-batches of each logical shard, or of each replica. Under bundles not all have equally many."""

    @property
    def filling(self) -> Filling:
        """Without the positions that make shapes alike and without the schedule's fillers."""
        num_positions = sum(
            max(len(batch), 1) * padded_length(self._longest(batch), self.limits)
            for share in self.shares
            for batch in share
        )
        num_batches = -(-sum(map(len, self.shares)) // self.place.num_replicas)
        padding = 1 - sum(self.lengths) / num_positions if num_positions else 0.0
        return Filling(num_batches, padding, num_positions)

    def replica_tokens(self) -> list[list[int]]:
        """The tokens of each micro-batch without padding, by replica."""
        num_own = len(self.shares) // self.place.num_replicas
        return [
            [
                sum(self.lengths[index] for index in batch)
                for share in self.shares[replica * num_own : (replica + 1) * num_own]
                for batch in share
            ]
            for replica in range(self.place.num_replicas)
        ]

    def own(self, sequences: Sequence[Sequence[int]]) -> list[TokenBatch]:
        """The micro-batches of this replica, for sequences of these lengths."""
        num_own = len(self.shares) // self.place.num_replicas

        def run_by(replica: int) -> list[TokenBatch]:
            own = range(replica * num_own, (replica + 1) * num_own)
            shard_of = own if self.place.num_shards else [None] * num_own
            return [
                replace(pad(sequences, batch, self.limits), shard=shard)
                for share, shard in zip(own, shard_of, strict=True)
                for batch in self.shares[share]
            ]

        own = run_by(self.place.replica)
        if not self.place.alike:
            return own
        together = zip(*(run_by(other) for other in range(self.place.num_replicas)), strict=True)
        return [_widened(batch, [other.shape for other in same]) for batch, same in zip(own, together, strict=True)]

    def _longest(self, batch: tuple[int, ...]) -> int:
        return max((self.lengths[index] for index in batch), default=FILLER_LENGTH)


def plan_micro_batches(lengths: Sequence[int], limits: Limits, place: ReplicaPlace = ALONE) -> MicroBatchPlan:
    """Raises SampleOverCap."""
    num_shares = place.num_shards or place.num_replicas
    if isinstance(limits, TokenCap):
        shares = pack(lengths, limits, num_shares=num_shares, multiple=place.multiple, alike=place.alike)
    else:
        batches = cut(lengths, limits)
        shares = [deal(batches, num_replicas=num_shares, replica=share) for share in range(num_shares)]
    return MicroBatchPlan(tuple(lengths), limits, place, shares)


def replica_batches(
    sequences: Sequence[Sequence[int]], limits: Limits, place: ReplicaPlace = ALONE
) -> list[TokenBatch]:
    """The micro-batches of one replica. Raises SampleOverCap."""
    return plan_micro_batches([len(tokens) for tokens in sequences], limits, place).own(sequences)


def padded_length(length: int, limits: Limits) -> int:
    return math.ceil(length / limits.pad_multiple) * limits.pad_multiple


def _widened(batch: TokenBatch, shapes: Sequence[tuple[int, int]]) -> TokenBatch:
    tokens_BS = np.zeros(np.max(shapes, axis=0), dtype=np.int64)
    tokens_BS[: batch.shape[0], : batch.shape[1]] = batch.tokens_BS
    return replace(batch, tokens_BS=tokens_BS)


def _fits(num_sequences: int, length: int, limits: BatchLimits) -> bool:
    sequences_fit = limits.max_sequences is None or num_sequences <= limits.max_sequences
    return sequences_fit and (limits.max_tokens is None or num_sequences * length <= limits.max_tokens)
