"""What is proposed for the job as it is: the policy is asked where it can be, else everything stays. Pure.

Order: whether the policy is asked at all; its choice, as each component's GPUs and layout; what it is to remember.

It is not asked while the job is starting, stopping or paused, while no iteration is open or told of, while a person
moves the actor, and while the actor waits for ranks that died. Then every component is where the policy last put it in
this iteration, else where the config places it. A person's word comes first, and everything else goes home for it; so
it does for a component that was given none and has a new lead: that one tells nothing of the iteration before it works.

Invariants:
- work that waits for nothing but GPUs has some, where a policy forgot it too: a death makes work anew, of which the
  rules of others' policies say nothing; and its policy goes on from there;
- a trainer that is to change its GPUs or its layout begins no minibatch before it has;
- without a choice nothing is forgotten, and the trainer holds on or goes on as it was told;
- it wants to be asked again later than now, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.scheduler.decide.homes import Home, home_of, without
from services.scheduler.decide.situations import situation_of
from services.scheduler.policy import Policy, Proposal
from services.scheduler.policy.situation import Situation
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.layouts import engine_size, replica_size, with_dp
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
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
    home = home_of(state, state.spec, policy)
    if why := _not_asked(state):
        return _as_it_is(state, policy, home, why)
    situation = situation_of(state, now_ms, home=home.spec)
    if situation is None:
        return _as_it_is(state, policy, home, "nothing was told of the iteration yet")
    return chosen(policy, situation, home.gone)


def chosen(policy: Policy, situation: Situation, gone: frozenset[GpuId] = frozenset()) -> Proposed:
    """`gone`: GPUs that the job goes on without."""
    choice = policy.choose(situation)
    wanted, trains, reason = choice.assignment, choice.trains, choice.reason
    remembered = choice.remembered(situation)
    if (left := without(wanted, situation.spec, gone, policy)) != wanted:
        wanted, remembered = left, replace(remembered, assignment=left)
        reason = f"{reason}, but for {', '.join(sorted(gone))}"
    if forgotten := _forgotten(situation, wanted):
        wanted, trains = as_configured(situation.spec), trains or situation.is_inferred
        # Else the policy would want its own back as soon as the first GPU is on its way, and take turns with this.
        remembered = replace(remembered, assignment=wanted)
        reason = f"{forgotten} and nobody has a GPU for them: everything where it is placed, against {reason}"
    trains = trains and _is_where_it_trains(situation, wanted)
    placement = placement_of(situation.spec, wanted)
    proposal = Proposal(placement, reason, trains=trains, group_order=choice.group_order, gone=gone)
    is_later = choice.ask_at_ms is not None and choice.ask_at_ms > situation.now_ms
    return Proposed(
        proposal,
        remembered=replace(remembered, trains=trains),
        ask_at_ms=choice.ask_at_ms if is_later else None,
    )


def _forgotten(situation: Situation, assignment: Assignment) -> str:
    """The first stage that has work and is to have no GPUs, with its numbers; empty where each has some."""
    training = situation.trainer.training
    if situation.moving:
        return ""
    if situation.num_unfinished:
        return "" if assignment.engines else f"{situation.num_unfinished} sequences are unfinished"
    if not situation.is_inferred:
        num_left = situation.generation.num_groups - len(situation.inference.inferring.ready)
        return "" if assignment.inference else f"{num_left} groups are not inferred"
    num_left = situation.spec.num_minibatches - training.num_minibatches_done
    return "" if assignment.trainer or not num_left else f"{num_left} minibatches are not trained"


def _is_where_it_trains(situation: Situation, assignment: Assignment) -> bool:
    """A trainer that is to be elsewhere begins no minibatch before it is there: one on the GPUs that it has would keep
    the others waiting for it to end."""
    return situation.trainer.placed in (None, assignment.trainer)


def placement_of(spec: JobSpec, assignment: Assignment) -> dict[Role, Placed | None]:
    """Each component's GPUs in rank order, and its layout with as many copies, or engines, as they make."""
    engines = tuple(gpu for engine in assignment.engines for gpu in engine)
    size = engine_size(spec)
    assert all(len(engine) == size for engine in assignment.engines), f"engines of odd sizes: {assignment}"
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


def _as_it_is(state: ClusterState, policy: Policy, home: Home, why: str) -> Proposed:
    spec = home.spec
    placement: Mapping[Role, Placed | None] = spec.placement
    held, trains = state.remembered, True
    if state.asked is not None:
        if state.components[Role.ACTOR].is_up:
            placement = {**spec.placement, Role.ACTOR: state.asked}
    elif (assignment := _assigned(state)) is not None:
        assigned = placement_of(spec, without(assignment, spec, home.gone, policy))
        if not _has_mute(state, assigned):
            placement, trains = assigned, held.trains
    sizes = ", ".join(f"{role} {len(placed.gpus) if (placed := placement[role]) else 0}" for role in Role)
    reason = f"{why}: GPUs as they are ({sizes})"
    return Proposed(Proposal(placement, reason, trains=trains, gone=home.gone), held)


def _assigned(state: ClusterState) -> Assignment | None:
    """By the policy, in the open iteration."""
    held, iteration = state.remembered, state.iteration
    is_of = iteration is not None and held.is_of(state.incarnation, iteration.plan.iteration)
    return held.assignment if is_of else None


def _has_mute(state: ClusterState, assigned: Mapping[Role, Placed | None]) -> bool:
    """Whether somebody who was given no GPUs has told nothing."""
    seen = state.seen
    pictures = {Role.ACTOR: seen.training, Role.ROLLOUT: seen.generation, Role.INFERENCE: seen.inferring}
    return any(picture is None and assigned[role] is None for role, picture in pictures.items())
