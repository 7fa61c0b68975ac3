"""Which GPUs a job goes on without, and where its components are at home then. Pure.

A GPU that is lost is asked for at its gate. One that cannot be had for a minute (`absences`), because its gate has not
let go of it or because no instance of its node lives, is gone: the components are at home on the others. Each keeps its
whole copies, what is left of broken ones makes others, inside a node first, and one that has none left gets what is
free of its own slots (those that stand by are the actor's alone), or else what rollout or inference can spare. The
actor spares none: it lets go of GPUs after an update, which may wait for that very component. Once the gate says that
nobody holds it, the GPU is as any other again.

Before the policy's first choice in the job nothing is gone: whoever cannot do without a GPU that is lost then fails
the job, as under a fixed split.

Invariants: nothing is gone where a component could not get a copy, nor under a policy that leaves everything where the
config has it, nor while the job ends; no home has such a GPU, and none is in two homes; every layout is one that its
component can run (experts, logical shards); that of an actor that lost a copy is one that the policy's `check` accepts
where there is one: what RLinf would not have started with is better than a job that fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

from services.scheduler.policy import Policy
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.layouts import most_copies, replica_size, replicas, with_dp
from services.scheduler.state.remembered import Assignment, as_configured
from services.scheduler.state.units import but_for, in_units
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Layout, Role

DONORS = (Role.ROLLOUT, Role.INFERENCE)


@dataclass(frozen=True, slots=True)
class Home:
    """The job with every component placed where it starts, and the GPUs that it goes on without."""

    spec: JobSpec
    gone: frozenset[GpuId] = frozenset()


def home_of(state: ClusterState, spec: JobSpec, policy: Policy) -> Home:
    """The actor where a person moved it."""
    home = moved(state, spec)
    gone = frozenset(gpu for gpu, absence in state.absent.items() if absence.is_long)
    left = _left(home, gone, policy) if gone else None
    return Home(home) if left is None or _waits_for_actor(state, left) else Home(left, gone)


def moved(state: ClusterState, spec: JobSpec) -> JobSpec:
    """The job with its actor where a person moved it, its other slots standing by, and the others where the config
    places them."""
    actor = state.home(Role.ACTOR) or spec.placement[Role.ACTOR]
    standby = tuple(but_for(spec.slots(Role.ACTOR), actor.gpus))
    return replace(spec, placement={**spec.placement, Role.ACTOR: actor}, standby=standby)


def _waits_for_actor(state: ClusterState, home: JobSpec) -> bool:
    """Whether a component that went down is to start on what the actor has in this iteration."""
    held = {grant.gpu for grant in state.components[Role.ACTOR].grants}
    down = [role for role in DONORS if not (state.components[role].is_up or state.components[role].is_suspended)]
    return any(not held.isdisjoint(home.placement[role].gpus) for role in down)


def without(assignment: Assignment, spec: JobSpec, gone: frozenset[GpuId], policy: Policy) -> Assignment:
    """Where a component would have nothing left of what it was assigned, everything is where `spec` places it."""
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


def _left(spec: JobSpec, gone: frozenset[GpuId], policy: Policy) -> JobSpec | None:
    """With as many copies of the actor as the policy accepts, or, where it accepts none, as there can be; an actor that
    lost none stays where it is, by a person's word too, which no policy is asked about. None where a component would
    have none: the actor has fewer for the policy's sake alone."""
    most: JobSpec | None = None
    had = spec.placement[Role.ACTOR]
    for trainer in tuple(_copies(spec, Role.ACTOR, had, gone)) or (None,):
        placement = _shared(spec, gone, trainer)
        if placement is None:
            break
        left = replace(spec, placement=placement)
        if trainer == had or _accepts(policy, left):
            return left
        most = most or left
    return most


def _shared(spec: JobSpec, gone: frozenset[GpuId], trainer: Placed | None) -> dict[Role, Placed] | None:
    """`trainer`: None where the actor has no copy left. None where a component would have none."""
    left = {role: next(_copies(spec, role, spec.placement[role], gone), None) for role in DONORS}
    left[Role.ACTOR] = trainer
    for role in Role:
        if left[role] is not None:
            continue
        home = spec.placement[role].layout
        layout = next((each for dp in range(1, home.dp + 1) if (each := with_dp(home, dp))), home)
        found = _spared(spec, role, left=left, gone=gone, layout=layout)
        if found is None:
            return None
        gpus, left = found
        left[role] = Placed(gpus, layout)
    return {role: placed for role in Role if (placed := left[role]) is not None}


def _spared(
    spec: JobSpec, role: Role, *, left: Mapping[Role, Placed | None], gone: frozenset[GpuId], layout: Layout
) -> tuple[tuple[GpuId, ...], dict[Role, Placed | None]] | None:
    """GPUs for the layout that are in no copy, of the role's own slots if they are enough, or of as few copies as need
    be of who has most, and what is left then; None where that would take somebody's last copy."""
    others = dict(left)
    while True:
        held = {gpu for placed in others.values() if placed for gpu in placed.gpus}
        own = but_for(spec.slots(role), {*held, *gone})
        of_others = [gpu for each in Role if each is not role for gpu in spec.placement[each].gpus]
        for spare in (own, own + but_for(of_others, {*held, *gone, *own})):
            if len(spare) >= layout.num_ranks:
                return in_units(spare, replica_size(layout), layout.num_ranks), others
        donors = [(placed.layout.dp, each) for each in DONORS if (placed := others[each]) and placed.layout.dp > 1]
        smaller = {each: _fewer(others[each]) for _, each in sorted(donors, key=lambda each: -each[0])}
        donor, placed = next(((each, placed) for each, placed in smaller.items() if placed), (None, None))
        if donor is None or placed is None:
            return None
        others[donor] = placed


def _fewer(placed: Placed | None) -> Placed | None:
    """With at least one copy less; None where there is no such layout."""
    return most_copies(placed.layout, placed.gpus, most=placed.layout.dp - 1) if placed else None


def _copies(spec: JobSpec, role: Role, placed: Placed, gone: Set[GpuId]) -> Iterator[Placed]:
    """Its whole copies in rank order, then those that the rest of the broken ones makes: as many as there is a layout
    for, then ever fewer."""
    size = replica_size(placed.layout)
    copies = replicas(placed.gpus, size)
    whole = [gpu for copy in copies if gone.isdisjoint(copy) for gpu in copy]
    broken = [gpu for copy in copies if not gone.isdisjoint(copy) for gpu in copy if gpu not in gone]
    gpus = (*whole, *in_units(broken, size, len(broken)))
    num_shards, most = spec.num_logical_shards if role is Role.ACTOR else None, len(gpus) // size
    while (found := most_copies(placed.layout, gpus, most=most, num_shards=num_shards)) is not None:
        yield found
        most = found.layout.dp - 1
