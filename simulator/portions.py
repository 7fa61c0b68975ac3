"""The portions in which the trainer takes the groups of a minibatch, and how evenly its replicas share one. Pure.

The actor's own code cuts portions (`services.actor.portions`) and packs them into micro-batches (`tidegate.megatron`).
A workload without limits of micro-batches has an ideal trainer: each group is a portion, and replicas share it evenly
as far as the sequences of a minibatch divide.

Two things of a real actor are left out. A layout with experts or virtual stages packs a little otherwise. The first
portion of a job is not cut to `PORTION_S`, as nothing is measured yet.

Invariants:
- Every group is in one portion. [test_portions: portions_cover_every_group]
- The busiest replica has at least a fair share. [test_portions: at_least_a_fair_share]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.actor.portions import PORTION_S, Portion, next_portion
from simulator.cost_model import TrainerLaw, imbalance
from simulator.workload import Workload
from tidegate.megatron.batching import Limits, ReplicaPlace, plan_micro_batches
from tidegate.megatron.bundles import plan_bundles
from tidegate.types import Layout


@dataclass(frozen=True, slots=True)
class Joining:
    """The groups that may join the open minibatch, in the order of training."""

    joining: tuple[int, ...]
    is_filled_by_joining: bool


class Portions:
    def __init__(self, workload: Workload, costs: TrainerLaw) -> None:
        self._workload, self._costs = workload, costs

    def next(self, groups: Sequence[int], *, num_missing: int, layout: Layout) -> Portion | None:
        """The next portion of the minibatch, which `num_missing` groups fill. None while none is ready."""
        joining = tuple(groups[:num_missing])
        is_filled = len(joining) == num_missing
        if not joining or not (is_filled or self._workload.streams):
            return None
        limits = self._workload.limits
        if limits is None:
            return Portion(joining[:1], (), is_last=num_missing == 1)
        return next_portion(
            Joining(joining, is_filled),
            {group: self._workload.sequence_tokens(group) for group in self._trained(joining)},
            limits,
            dp=layout.dp,
            streams=self._workload.streams,
            most_tokens=self._most_tokens(layout),
        )

    def unevenness(self, portion: Portion, *, size: int, first_bundle: int, layout: Layout) -> float:
        """The time of the portion over that of evenly shared tokens, at least 1.

        `size`: the groups of its minibatch. `first_bundle`: the bundles of the portions before it."""
        limits = self._workload.limits
        if limits is None:
            return imbalance(size * self._workload.group_size, layout.dp)
        trained = self._trained(portion.prompts)
        lengths = [tokens for group in trained for tokens in self._workload.sequence_tokens(group)]
        if not lengths:
            return 1.0
        busiest = _busiest(lengths, portion, limits, self._place(layout), first_bundle)
        return busiest * layout.dp / sum(lengths)

    def _trained(self, groups: Sequence[int]) -> list[int]:
        return [group for group in groups if group not in self._workload.filtered]

    def _most_tokens(self, layout: Layout) -> float:
        if not self._workload.carries_gradients:
            return math.inf
        return PORTION_S / self._costs.tokens_s(1.0, layout)

    def _place(self, layout: Layout) -> ReplicaPlace:
        return ReplicaPlace(num_replicas=layout.dp, num_shards=self._workload.num_logical_shards)


def _busiest(lengths: Sequence[int], portion: Portion, limits: Limits, place: ReplicaPlace, first_bundle: int) -> int:
    """The tokens of the replica with the most, without padding."""
    if place.num_shards is None:
        plan = plan_micro_batches(lengths, limits, place)
    else:
        plan = plan_bundles(lengths, portion.bundle_sizes, limits, place, first_bundle=first_bundle)
    return max(sum(micro_batches) for micro_batches in plan.replica_tokens())
