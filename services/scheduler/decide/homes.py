"""Finds the GPUs that a job goes on without, and each component's home on the other GPUs. Pure.

A home is the placement in which a component starts. A person can change it (`state.homes`), and take GPUs away from the
job: drained GPUs are in no home. The scheduler asks a lost GPU's gate for it. A GPU is gone once it
was absent for a minute (`absences`): its gate does not let go of it, or no instance of its node lives. When a gate says
later that nobody holds the GPU, it is an ordinary GPU again.

Each component gets its home in this order:
1. It keeps its whole copies.
2. The remaining GPUs of its broken copies make new copies, inside a node first.
3. A component without a copy gets free GPUs of its own slots. Standby slots are for the actor alone.
4. Otherwise it gets GPUs that the rollout or the inference can spare. The actor spares none: it lets go of GPUs only
   after an update, and that update may wait for this very component.

Before the policy's first choice in the job no GPU is gone. A component that needs a lost GPU then fails the job, as
under a fixed split.

Invariants:
- No GPU is gone where a component could not get a copy. [test_homes: waits_for_lost_gpus_where]
- No GPU is gone under a policy that leaves every component where the config places it.
  [test_absences: under_the_static_policy_a_node]
- No GPU is gone before the policy's first choice or while the job ends.
  [test_absences: before_the_first_choice_and_after]
- No home contains a drained GPU, where each component can have a copy without it.
  [test_manual_moves: no_home_contains_a_drained_gpu]
- Drained GPUs are used rather than gone ones, where a component would have no copy without both.
  [test_homes: rather_than_lost_ones]
- No home contains a gone GPU, and no GPU is in two homes. [test_homes: goes_on_without_gpus_is_at_home]
- Every layout is one that its component can run (experts, logical shards). [test_homes: copies_that_divide_its_shards]
- An actor that lost a copy gets a layout that the policy's `check` accepts, where there is one. Otherwise it gets a
  layout that RLinf would not have started with: that is better than a job that fails.
  [test_homes: a_home_is_one_that_the_policy]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

from services.scheduler.policy import Policy
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.homes import DONORS, home_spec
from services.scheduler.state.layouts import most_copies, replica_size, replicas, with_dp
from services.scheduler.state.remembered import Assignment, as_configured
from services.scheduler.state.units import but_for, in_units
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Layout, Role


@dataclass(frozen=True, slots=True)
class Home:
    """`spec` is the job with each component at its home. `gone` are the lost GPUs that the job goes on without,
    `drained` those that a person took away."""

    spec: JobSpec
    gone: frozenset[GpuId] = frozenset()
    drained: frozenset[GpuId] = frozenset()

    @property
    def closed(self) -> frozenset[GpuId]:
        """The GPUs that no component gets."""
        return self.gone | self.drained


def home_of(state: ClusterState, spec: JobSpec, policy: Policy) -> Home:
    """The home of each component, without GPUs that are gone or drained. Where a component would have no copy without
    both, drained GPUs are used. Lost ones are waited for only if that is not enough."""
    home, gone, drained = home_spec(state, spec), gone_gpus(state), frozenset(state.manual.drained)
    for taken in dict.fromkeys((drained, frozenset[GpuId]())) if gone else ():
        left = remaining_home(home, gone | taken, policy)
        if left is None:
            continue
        if _waits_for_actor(state, left):
            break
        return Home(left, gone, taken)
    left = remaining_home(home, drained, policy) if drained else None
    return Home(home) if left is None else Home(left, drained=drained)


def gone_gpus(state: ClusterState) -> frozenset[GpuId]:
    """The lost GPUs that the job goes on without, if it can."""
    return frozenset(gpu for gpu, absence in state.absent.items() if absence.is_long)


def _waits_for_actor(state: ClusterState, home: JobSpec) -> bool:
    """Whether a component that is down would start on GPUs that the actor has in this iteration."""
    held = {grant.gpu for grant in state.components[Role.ACTOR].grants}
    down = [role for role in DONORS if not (state.components[role].is_up or state.components[role].is_suspended)]
    return any(not held.isdisjoint(home.placement[role].gpus) for role in down)


def without(assignment: Assignment, spec: JobSpec, gone: frozenset[GpuId], policy: Policy) -> Assignment:
    """The assignment without the `gone` GPUs. Where that leaves an assigned component without a copy, it is the
    placement of `spec` for all components."""
    if gone.isdisjoint(assignment.gpus):
        return assignment
    engines = tuple(engine for engine in assignment.engines if gone.isdisjoint(engine))
    had = most_copies(spec.placement[Role.INFERENCE].layout, assignment.inference)
    inference = next(_copies(spec, Role.INFERENCE, had, gone), None) if had else None
    trainers = tuple(_copies(spec, Role.ACTOR, assignment.trainer, gone)) if assignment.trainer else ()
    at_work = {each: replace(spec, placement={**spec.placement, Role.ACTOR: each}) for each in trainers}
    accepted = (each for each in trainers if each == assignment.trainer or _accepts(policy, at_work[each]))
    trainer = next(accepted, next(iter(trainers), None))
    has_lost_all = (
        (assignment.engines and not engines)
        or (assignment.inference and inference is None)
        or (assignment.trainer is not None and trainer is None)
    )
    return as_configured(spec) if has_lost_all else Assignment(engines, trainer, inference.gpus if inference else ())


def _accepts(policy: Policy, spec: JobSpec) -> bool:
    try:
        policy.check(spec)
    except ValueError:
        return False
    return True


def remaining_home(spec: JobSpec, gone: frozenset[GpuId], policy: Policy) -> JobSpec | None:
    """The job on its remaining GPUs; None where a component would have no copy.

    The actor has the most copies that the policy accepts, or where it accepts none, the most that there can be. An
    actor that lost no copy stays where it is, also where a person moved it: no policy checks a manual move."""
    most: JobSpec | None = None
    had = spec.placement[Role.ACTOR]
    for trainer in tuple(_copies(spec, Role.ACTOR, had, gone)) or (None,):
        placement = _remaining_placement(spec, gone, trainer)
        if placement is None:
            break
        left = replace(spec, placement=placement)
        if trainer == had or _accepts(policy, left):
            return left
        most = most or left
    return most


def _remaining_placement(spec: JobSpec, gone: frozenset[GpuId], trainer: Placed | None) -> dict[Role, Placed] | None:
    """Each component's remaining placement; None where a component would have no copy. `trainer` is None where the
    actor has no copy left."""
    left = {role: next(_copies(spec, role, spec.placement[role], gone), None) for role in DONORS}
    left[Role.ACTOR] = trainer
    for role in Role:
        if left[role] is not None:
            continue
        home = spec.placement[role].layout
        layout = next((each for dp in range(1, home.dp + 1) if (each := with_dp(home, dp))), home)
        found = _spare_gpus(spec, role, left=left, gone=gone, layout=layout)
        if found is None:
            return None
        gpus, left = found
        left[role] = Placed(gpus, layout)
    return {role: placed for role in Role if (placed := left[role]) is not None}


def _spare_gpus(
    spec: JobSpec, role: Role, *, left: Mapping[Role, Placed | None], gone: frozenset[GpuId], layout: Layout
) -> tuple[tuple[GpuId, ...], dict[Role, Placed | None]] | None:
    """GPUs for the layout, and the other components' placements without them. None where that would take a component's
    last copy.

    1. Take GPUs of the role's own slots that are in no copy, if they are enough.
    2. Otherwise take GPUs of any slot that are in no copy.
    3. Otherwise take a copy from the donor with the most copies, and try again."""
    others = dict(left)
    while True:
        held = {gpu for placed in others.values() if placed for gpu in placed.gpus}
        own = but_for(spec.slots(role), {*held, *gone})
        of_others = [gpu for each in Role if each is not role for gpu in spec.placement[each].gpus]
        for spare in (own, own + but_for(of_others, {*held, *gone, *own})):
            if len(spare) >= layout.num_ranks:
                return in_units(spare, replica_size(layout), layout.num_ranks), others
        donors = [(placed.layout.dp, each) for each in DONORS if (placed := others[each]) and placed.layout.dp > 1]
        smaller = {each: _with_fewer_copies(others[each]) for _, each in sorted(donors, key=lambda each: -each[0])}
        donor, placed = next(((each, placed) for each, placed in smaller.items() if placed), (None, None))
        if donor is None or placed is None:
            return None
        others[donor] = placed


def _with_fewer_copies(placed: Placed | None) -> Placed | None:
    """The placement with at least one copy less; None where there is no such layout."""
    return most_copies(placed.layout, placed.gpus, most=placed.layout.dp - 1) if placed else None


def _copies(spec: JobSpec, role: Role, placed: Placed, gone: Set[GpuId]) -> Iterator[Placed]:
    """Placements without the `gone` GPUs, from the most copies that have a layout down to the fewest. Whole copies come
    first, in rank order, then copies from the remaining GPUs of broken ones."""
    size = replica_size(placed.layout)
    copies = replicas(placed.gpus, size)
    whole = [gpu for copy in copies if gone.isdisjoint(copy) for gpu in copy]
    broken = [gpu for copy in copies if not gone.isdisjoint(copy) for gpu in copy if gpu not in gone]
    gpus = (*whole, *in_units(broken, size, len(broken)))
    num_shards, most = spec.num_logical_shards if role is Role.ACTOR else None, len(gpus) // size
    while (found := most_copies(placed.layout, gpus, most=most, num_shards=num_shards)) is not None:
        yield found
        most = found.layout.dp - 1
