"""Cuts the groups of a minibatch into bundles as they come, and deals bundles to logical shards. Pure.

A bundle is a run of consecutive groups of samples that fill about one micro-batch. It is packed by itself, so its
micro-batches depend on nothing else. A portion of a minibatch is a run of complete bundles.

    bundle n goes to the logical shard whose number is n modulo num_shards, with its bits reversed

A replica's logical shards follow one another (`tidegate.megatron.reproducible`). With reversed bits, each dp
consecutive bundles go to dp different replicas, for every dp that divides the shards. So no replica waits for the last
groups of a minibatch.

Invariants:
- The bundles are a function of the groups before their end: a group that comes later changes none that is full.
  [test_bundles: later_groups_change_no_full_bundle]
- Of as many consecutive bundles as there are replicas, each replica gets one. [test_bundles: each_replica_gets_one]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tidegate.megatron.batching import Limits, MicroBatchPlan, ReplicaPlace, plan_micro_batches
from tidegate.megatron.packing import TokenCap


@dataclass(frozen=True, slots=True)
class Bundles:
    """The number of groups in each bundle. `is_last_full`: whether further groups begin another bundle."""

    sizes: tuple[int, ...]
    is_last_full: bool

    @property
    def num_full(self) -> int:
        return len(self.sizes) - (bool(self.sizes) and not self.is_last_full)


def bundles_of(groups: Sequence[Sequence[int]], limits: Limits) -> Bundles:
    """The bundles of these groups, which are given as the lengths of their samples.

    A bundle is full when another group of its mean size would not fit into one micro-batch.
    """
    sizes: list[int] = []
    num_groups, taken = 0, 0
    for lengths in groups:
        num_groups, taken = num_groups + 1, taken + _size(lengths, limits)
        if taken * (num_groups + 1) > _room(limits) * num_groups:
            sizes.append(num_groups)
            num_groups = taken = 0
    return Bundles((*sizes, num_groups) if num_groups else tuple(sizes), is_last_full=not num_groups)


def shard_of(bundle: int, num_shards: int) -> int:
    """`num_shards` is a power of two."""
    num_bits = num_shards.bit_length() - 1
    return int(f"{bundle % num_shards:0{num_bits}b}"[::-1], 2) if num_bits else 0


def plan_bundles(
    lengths: Sequence[int], sizes: Sequence[int], limits: Limits, place: ReplicaPlace, *, first_bundle: int
) -> MicroBatchPlan:
    """The micro-batches of bundles. `sizes` are their numbers of samples, and `lengths` those of all their samples.

    `first_bundle` is the number of the first of them in its minibatch. The place has logical shards.

    Raises ValueError where the sizes do not add up, and SampleOverCap.
    """
    assert place.num_shards is not None, "without logical shards a portion is packed as a whole"
    if sum(sizes) != len(lengths):
        raise ValueError(f"bundles of {list(sizes)} samples are not the {len(lengths)} samples of the portion")
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(place.num_shards)]
    for number, (first, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False), first_bundle):
        (batches,) = plan_micro_batches(lengths[first : first + size], limits).shares
        shares[shard_of(number, place.num_shards)] += [tuple(first + index for index in batch) for batch in batches]
    return MicroBatchPlan(tuple(lengths), limits, place, shares)


def _size(lengths: Sequence[int], limits: Limits) -> int:
    """What a group takes of a micro-batch's room: positions under a token cap, else sequences."""
    return sum(map(limits.row_length, lengths)) if isinstance(limits, TokenCap) else len(lengths)


def _room(limits: Limits) -> int:
    if isinstance(limits, TokenCap):
        return limits.max_tokens
    return limits.max_sequences or 1
