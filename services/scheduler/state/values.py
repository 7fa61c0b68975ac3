"""The values that the scheduler's events, commands and state share.

A `JobSpec` comes from a checked config, which places a GPU in at most one component. Nothing here checks it again.

Invariants:
- Fates of the same ids have the same sum, in whatever order and parts they are added.
  [test_values: equal_ids_have_equal_sums]
- A missing or doubled id changes the count or the digest of a sum. [test_values: missing_or_doubled_id]
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
    """The number of samples with one outcome, and the digest of their ids, which does not depend on an order.

    `reason` says why samples were filtered or discarded. It is empty otherwise.
    """

    reason: str = ""
    num_samples: int = 0
    ids_digest: int = 0


def total(fates: Iterable[Fate], *, reason: str = "") -> Fate:
    """The sum of `fates`."""
    listed = tuple(fates)
    return Fate(
        reason=reason,
        num_samples=sum(fate.num_samples for fate in listed),
        ids_digest=sum(fate.ids_digest for fate in listed) % DIGEST_MODULUS,
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One published version of the weights. `message` is the wire's Snapshot, which the scheduler does not read."""

    incarnation: int
    version: int
    checksum: str
    weights_checksum: str
    """The checksum of the unsharded weights. It does not depend on the layout of the writer."""
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
    """The scheduler's part of a job's config. `uses_reference`: the KL term is on, so inference holds version 0."""

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
    """GPUs of no placement. The actor may get them without a person or a policy, and so replace those that it lost."""
    max_extra_prompts: int = 0
    """How many prompts an iteration may add to replace groups without a training signal."""
    evaluate_every: int | None = None
    """The number of iterations between evaluations. None: there are no evaluations."""
    minibatch_order: MinibatchOrder = MinibatchOrder.FIXED
    streams: bool = True
    """A minibatch begins with the first groups that arrive. Otherwise it begins once all its groups are there."""
    carries_gradients: bool = False
    """An open minibatch goes on in the new layout after a reshard. Otherwise it keeps its layout, or begins again."""
    scores_ahead: bool = False
    """Inference scores responses as they end. Otherwise it waits for all responses of a group."""
    num_logical_shards: int | None = None
    """Every dp of a reproducible actor divides this number. None: every dp is allowed."""
    layouts: tuple[Layout, ...] = ()
    """The layouts that a policy may choose for the actor besides copies like those of its home, in any number."""
    fewest_actor_copies: int = 1
    """The fewest copies like those of the actor's home that a policy may choose: fewer have no room for the model."""
    costs: Costs = ASSUMED_COSTS
    rates: Rates = ASSUMED_RATES
    lengths: LengthLaw = ASSUMED_LENGTHS
    """`costs`, `rates` and `lengths` hold until the job has measured its own."""

    def slots(self, role: Role) -> tuple[GpuId, ...]:
        """The GPUs that the component is configured for, standby GPUs included."""
        return self.placement[role].gpus + (self.standby if role is Role.ACTOR else ())

    @property
    def num_samples_per_minibatch(self) -> int:
        """The planned number over all replicas. Later filtering does not change it."""
        return self.num_prompts // self.num_minibatches * self.group_size

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """The GPUs of all components, sorted by id."""
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
