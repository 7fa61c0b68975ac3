"""What is proposed for the job as it is: the policy is asked where it can be, else everything stays. Pure.

Order: whether the policy is asked at all; its choice, as each component's GPUs and layout; what it is to remember.

It is not asked while the job is starting, stopping or paused, while no iteration is open or told of, while a person
moves the actor, and while the actor waits for ranks that died. Then every component is where the policy last put it in
this iteration, else where the config places it; a person's word comes first, and everything else goes home for it.

Invariants:
- a trainer that is to change its GPUs or its layout begins no minibatch before it has;
- without a choice nothing is forgotten, and the trainer holds on or goes on as it was told;
- it wants to be asked again later than now, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.scheduler.policy import Policy, Proposal
from services.scheduler.policy.situation import Situation, engine_size, replica_size, with_dp
from services.scheduler.remembered import Assignment, Remembered
from services.scheduler.seeing import situation_of
from services.scheduler.state import ClusterState, Phase
from services.scheduler.values import JobSpec, Placed
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class Proposed:
    """`ask_at_ms`: when the policy wants to be asked again, should nothing happen before."""

    proposal: Proposal
    remembered: Remembered
    ask_at_ms: int | None = None


def proposal_of(state: ClusterState, policy: Policy, now_ms: int) -> Proposed:
    """Nothing before the job was submitted."""
    if state.spec is None:
        return Proposed(Proposal({}, "no config yet, so no placement"), state.remembered)
    spec = job_at_home(state, state.spec)
    if why := _not_asked(state):
        return _as_it_is(state, spec, why)
    situation = situation_of(replace(state, spec=spec), now_ms)
    if situation is None:
        return _as_it_is(state, spec, "nothing was told of the iteration yet")
    return chosen(policy, situation)


def chosen(policy: Policy, situation: Situation) -> Proposed:
    choice = policy.choose(situation)
    trains = choice.trains and _is_where_it_trains(situation, choice.assignment)
    proposal = Proposal(
        placement=placement_of(situation.spec, choice.assignment),
        reason=choice.reason,
        trains=trains,
        group_order=choice.group_order,
    )
    is_later = choice.ask_at_ms is not None and choice.ask_at_ms > situation.now_ms
    return Proposed(
        proposal,
        remembered=replace(choice.remembered, trains=trains),
        ask_at_ms=choice.ask_at_ms if is_later else None,
    )


def _is_where_it_trains(situation: Situation, assignment: Assignment) -> bool:
    """A trainer that is to be elsewhere begins no minibatch before it is there: one on the GPUs that it has would keep
    the others waiting for it to end."""
    return situation.trainer.placed in (None, assignment.trainer)


def job_at_home(state: ClusterState, spec: JobSpec) -> JobSpec:
    """The job with every component placed where it starts: the actor where a person moved it."""
    moved = state.home(Role.ACTOR) or spec.placement[Role.ACTOR]
    return replace(spec, placement={**spec.placement, Role.ACTOR: moved})


def placement_of(spec: JobSpec, assignment: Assignment) -> dict[Role, Placed | None]:
    """Each component's GPUs in rank order, and its layout with as many copies, or engines, as they make."""
    engines = tuple(gpu for engine in assignment.engines for gpu in engine)
    assert all(len(engine) == engine_size(spec) for engine in assignment.engines), f"engines of odd sizes: {assignment}"
    return {
        Role.ACTOR: assignment.trainer,
        Role.ROLLOUT: _copies(spec, Role.ROLLOUT, engines),
        Role.INFERENCE: _copies(spec, Role.INFERENCE, assignment.inference),
    }


def _copies(spec: JobSpec, role: Role, gpus: tuple[GpuId, ...]) -> Placed | None:
    if not gpus:
        return None
    layout = spec.placement[role].layout
    num_copies, rest = divmod(len(gpus), replica_size(layout))
    placed = None if rest else with_dp(layout, num_copies)
    assert placed is not None, f"{len(gpus)} GPUs make no whole copies of the {role}, {layout}"
    return Placed(gpus, placed)


def _not_asked(state: ClusterState) -> str:
    """Why; empty when it is."""
    if state.phase is not Phase.RUNNING:
        return f"the job is {state.phase}"
    if state.iteration is None:
        return "no iteration is open"
    if state.asked is not None:
        return "a person moves the actor"
    if state.components[Role.ACTOR].lacks_ranks:
        return "the actor waits for ranks that it lost"
    return ""


def _as_it_is(state: ClusterState, spec: JobSpec, why: str) -> Proposed:
    placement: Mapping[Role, Placed | None] = spec.placement
    held, trains = state.remembered, True
    iteration = state.iteration.plan.iteration if state.iteration is not None else None
    if state.asked is not None:
        if state.components[Role.ACTOR].is_up:
            placement = {**spec.placement, Role.ACTOR: state.asked}
    elif iteration is not None and held.assignment is not None and held.is_of(state.incarnation, iteration):
        placement, trains = placement_of(spec, held.assignment), held.trains
    sizes = ", ".join(f"{role} {len(placed.gpus) if (placed := placement[role]) else 0}" for role in Role)
    return Proposed(Proposal(placement, f"{why}: GPUs as they are ({sizes})", trains=trains), held)
