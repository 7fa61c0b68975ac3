"""The values that the scheduler's events, commands and state share.

Invariants: `Fate` adds like a multiset of ids: equal sets have equal counts and digests, a lost or doubled id shows in
one of them; a `JobSpec` places a GPU in at most one component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.scheduler.state.costs import ASSUMED_COSTS, ASSUMED_LENGTHS, ASSUMED_RATES, Costs, LengthLaw, Rates
from tidegate.types import GpuId, Layout, MinibatchOrder, Role

DIGEST_MODULUS = 2**64
"""Digests are sums of 64-bit hashes modulo this, as the wire says (`Fate.ids_digest`)."""


@dataclass(frozen=True, slots=True)
class Fate:
    """How many samples met one end, and the order-free digest of their ids. `reason` is empty but for losses."""

    reason: str = ""
    num_samples: int = 0
    ids_digest: int = 0


def total(fates: Iterable[Fate], *, reason: str = "") -> Fate:
    """All of `fates` as one."""
    listed = tuple(fates)
    return Fate(
        reason=reason,
        num_samples=sum(fate.num_samples for fate in listed),
        ids_digest=sum(fate.ids_digest for fate in listed) % DIGEST_MODULUS,
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One published version of the weights. `message` is the wire's Snapshot, carried through unread."""

    incarnation: int
    version: int
    checksum: str
    weights_checksum: str
    """Of the unsharded weights, whatever the layout that they were written in."""
    message: bytes


@dataclass(frozen=True, slots=True)
class IterationPlan:
    iteration: int
    version: int
    first_prompt: int
    num_prompts: int
    group_size: int
    num_minibatches: int
    seed: int
    max_extra_prompts: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A component's GPUs in rank order, and the layout they form."""

    gpus: tuple[GpuId, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the scheduler needs of a job's config. `uses_reference`: the KL term is on, inference holds version 0."""

    placement: Mapping[Role, Placed]
    num_iterations: int
    num_prompts: int
    group_size: int
    num_minibatches: int
    seed: int
    uses_reference: bool
    max_actor_restarts: int
    command_deadline_ms: int
    standby: tuple[GpuId, ...] = ()
    """GPUs that the actor may get besides those it is placed on."""
    max_extra_prompts: int = 0
    """Which an iteration may take to replace groups that teach nothing."""
    evaluate_every: int | None = None
    """Iterations between evaluations; None: there are none."""
    minibatch_order: MinibatchOrder = MinibatchOrder.FIXED
    num_logical_shards: int | None = None
    """Which every dp of a reproducible actor divides; None: any dp will do."""
    costs: Costs = ASSUMED_COSTS
    rates: Rates = ASSUMED_RATES
    lengths: LengthLaw = ASSUMED_LENGTHS
    """These three until the job has measured its own."""

    def slots(self, role: Role) -> tuple[GpuId, ...]:
        """All GPUs that it may ever have."""
        return self.placement[role].gpus + (self.standby if role is Role.ACTOR else ())

    @property
    def num_samples_per_minibatch(self) -> int:
        """Over all replicas, as it was planned: what is filtered later is left out of it."""
        return self.num_prompts // self.num_minibatches * self.group_size

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Of all components, by id."""
        return tuple(sorted({gpu for role in Role for gpu in self.slots(role)}))

    def plan(self, *, iteration: int, version: int, first_prompt: int) -> IterationPlan:
        return IterationPlan(
            iteration=iteration,
            version=version,
            first_prompt=first_prompt,
            num_prompts=self.num_prompts,
            group_size=self.group_size,
            num_minibatches=self.num_minibatches,
            seed=self.seed,
            max_extra_prompts=self.max_extra_prompts,
        )
