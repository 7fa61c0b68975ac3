"""Makes a proposal for the job: the policy's choice where it can be asked, else the present placement. Pure.

1. Find out whether to ask the policy.
2. Turn its choice into each component's GPUs and layout.
3. Keep what the policy remembers.

The policy is not asked
- while the job is starting, stopping or paused,
- while no iteration is open, or a component has not reported it yet,
- while a person moves the actor or splits the GPUs, and then until the iteration of the split ends,
- while a component has GPUs that a person drained,
- while the actor waits for ranks that died.

Then each component stays where the policy last placed it in this iteration. Without such a placement it goes
home. All components go home in two more cases:
- A person moves the actor, or splits the GPUs. A manual move overrides the policy, and components go where the person
  asks.
- A component has no GPUs, and its lead has not reported the iteration. A new lead reports nothing before it has GPUs.

Invariants:
- Work that waits only for GPUs gets GPUs, also where a policy forgot the work. A death makes work anew, which the rules
  of other systems' policies do not cover. The policy goes on from that placement.
  [test_proposals: work_that_a_policy_forgot]
- A trainer that is to change its GPUs or its layout begins no minibatch before the change.
  [test_proposals: begins_no_minibatch]
- It trains where it is while the change waits for an instance that is not there. [test_proposals: trains_where_it_is]
- While the policy is not asked, its memory stays, and the trainer goes on or stays on hold as before.
  [test_proposals: stays_where_the_policy_put_it]
- The policy is asked again at a later time than now, or at no set time. [test_proposals: a_time_that_has_passed]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from services.scheduler.decide.homes import Home, home_of, without
from services.scheduler.decide.policy_view import situation_of
from services.scheduler.evolve.manual_moves import is_held
from services.scheduler.policy import Policy, Proposal
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import node_of_instance
from services.scheduler.state.layouts import engine_size, replica_size, with_dp
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Role, node_of


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the policy looked at, and what it answered: for the job's log of decisions."""

    situation: Situation
    choice: Choice


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """A proposal and the policy's memory after it. `ask_at_ms` is the time at which to ask the policy again if no event
    comes before. `weighed` is None where the policy was not asked."""

    proposal: Proposal
    remembered: Remembered
    ask_at_ms: int | None = None
    weighed: Weighed | None = field(default=None, compare=False, repr=False)


def proposal_of(state: ClusterState, policy: Policy, now_ms: int) -> PolicyAnswer:
    """The proposal is empty before the job is submitted."""
    if state.spec is None:
        return PolicyAnswer(Proposal({}, "no config yet, so no placement"), state.remembered)
    home = home_of(state, state.spec, policy)
    if why := _reason_not_to_ask(state, home):
        return _present_placement(state, policy, home, why)
    situation = situation_of(state, now_ms, home=home.spec)
    if situation is None:
        return _present_placement(state, policy, home, "not every component has reported the iteration yet")
    closed = partial(_closed_to_trainer, state, state.spec)
    answer = answer_of(policy, situation, home.gone, drained=home.drained, closed_to_trainer=closed)
    return _with_manual_note(answer, state, home)


def answer_of(
    policy: Policy,
    situation: Situation,
    gone: frozenset[GpuId] = frozenset(),
    *,
    drained: frozenset[GpuId] = frozenset(),
    closed_to_trainer: Callable[[], frozenset[GpuId]] = frozenset,
) -> PolicyAnswer:
    """`gone`: lost GPUs that the job goes on without. `drained`: GPUs that a person took away from it.
    `closed_to_trainer` gives the GPUs that the trainer cannot come to now: it is asked where the trainer is to move."""
    choice = policy.choose(situation)
    assignment, trains, reason = choice.assignment, choice.trains, choice.reason
    remembered = choice.remembered(situation)
    if (remaining := without(assignment, situation.spec, gone | drained, policy)) != assignment:
        left_out = {"lost": gone.intersection(assignment.gpus), "drained": drained.intersection(assignment.gpus)}
        names = " and ".join(f"the {what} GPUs {', '.join(sorted(gpus))}" for what, gpus in left_out.items() if gpus)
        assignment, remembered = remaining, replace(remembered, assignment=remaining)
        reason = f"{reason}, without {names}"
    if idle_work := _work_without_gpus(situation, assignment):
        assignment, trains = as_configured(situation.spec), trains or situation.is_inferred
        # Avoid an endless change of plans: with its own choice in memory, the policy would return to it as soon as the
        # first GPU moves.
        remembered = replace(remembered, assignment=assignment)
        reason = f"{idle_work} and nobody has a GPU for them: all components return home instead of: {reason}"
    trains = trains and _is_where_it_trains(situation, assignment, closed_to_trainer)
    placement = placement_of(situation.spec, assignment)
    proposal = Proposal(placement, reason, trains=trains, group_order=choice.group_order, gone=gone)
    is_later = choice.ask_at_ms is not None and choice.ask_at_ms > situation.now_ms
    return PolicyAnswer(
        proposal,
        remembered=replace(remembered, trains=trains),
        ask_at_ms=choice.ask_at_ms if is_later else None,
        weighed=Weighed(situation, choice),
    )


def _work_without_gpus(situation: Situation, assignment: Assignment) -> str:
    """The first stage that has work and would have no GPUs, with its numbers; empty where no such stage exists."""
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


def _is_where_it_trains(situation: Situation, assignment: Assignment, closed: Callable[[], frozenset[GpuId]]) -> bool:
    """A trainer that is to move begins no minibatch before: the others would wait for the end of that minibatch."""
    placed, target = situation.trainer.placed, assignment.trainer
    if placed is None or placed == target:
        return True
    # Avoid a job that stands still: nobody knows when the instance returns that the move waits for.
    return target is not None and not closed().isdisjoint(set(target.gpus).difference(placed.gpus))


def _closed_to_trainer(state: ClusterState, spec: JobSpec) -> frozenset[GpuId]:
    """GPUs on nodes without a living instance of the actor."""
    nodes = {node_of_instance(name) for name in state.living(role=Role.ACTOR)}
    return frozenset(gpu for gpu in spec.gpus if node_of(gpu) not in nodes)


def placement_of(spec: JobSpec, assignment: Assignment) -> dict[Role, Placed | None]:
    """Each component's GPUs in rank order, and its layout with the copies or engines that these GPUs make."""
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


def _reason_not_to_ask(state: ClusterState, home: Home) -> str:
    """The reason why the policy is not asked; empty when it is asked."""
    if state.phase is not Phase.RUNNING:
        return f"the job is {state.phase}"
    if state.iteration is None:
        return "no iteration is open"
    if state.asked is not None:
        return f"a person moves the {'components' if state.manual.split else 'actor'}"
    if state.components[Role.ACTOR].lacks_ranks:
        return "the actor waits for ranks that it lost"
    at_work = {grant.gpu for role in Role for grant in state.components[role].grants}
    if drained := sorted(home.drained & at_work):
        return f"drained by hand and not given back yet: {', '.join(drained)}"
    if is_held(state):
        return f"placed by hand until iteration {state.iteration.plan.iteration} ends"
    return ""


def _with_manual_note(answer: PolicyAnswer, state: ClusterState, home: Home) -> PolicyAnswer:
    """The answer whose reason names what is so by hand."""
    homes = [role for role in Role if state.spec and state.home(role) != state.spec.placement[role]]
    notes = [f"; placed by hand: {', '.join(homes)}"] if homes else []
    if drained := state.manual.drained:
        are_used = "" if home.drained else ", and used: a component would have no copy without them"
        notes.append(f"; drained by hand: {', '.join(drained)}{are_used}")
    if not notes:
        return answer
    return replace(answer, proposal=replace(answer.proposal, reason=answer.proposal.reason + "".join(notes)))


def _present_placement(state: ClusterState, policy: Policy, home: Home, why: str) -> PolicyAnswer:
    spec = home.spec
    placement: Mapping[Role, Placed | None] = spec.placement
    held, trains = state.remembered, True
    if state.asked is not None:
        if state.components[Role.ACTOR].is_up:
            split = state.manual.split
            others = split if split.get(Role.ACTOR) == state.asked else {}
            placement = {**spec.placement, **others, Role.ACTOR: state.asked}
    elif not is_held(state) and (assignment := _present_assignment(state)) is not None:
        assigned = placement_of(spec, without(assignment, spec, home.closed, policy))
        if not _lacks_a_picture(state, assigned):
            placement, trains = assigned, held.trains
    sizes = ", ".join(f"{role} {len(placed.gpus) if (placed := placement[role]) else 0}" for role in Role)
    reason = f"{why}: the placement stays or returns to ({sizes})"
    return _with_manual_note(
        PolicyAnswer(Proposal(placement, reason, trains=trains, gone=home.gone), held), state, home
    )


def _present_assignment(state: ClusterState) -> Assignment | None:
    """The policy's last assignment in the open iteration."""
    held, iteration = state.remembered, state.iteration
    is_of = iteration is not None and held.is_of(state.incarnation, iteration.plan.iteration)
    return held.assignment if is_of else None


def _lacks_a_picture(state: ClusterState, assigned: Mapping[Role, Placed | None]) -> bool:
    """Whether a component without assigned GPUs has reported no picture of the iteration."""
    seen = state.seen
    pictures = {Role.ACTOR: seen.training, Role.ROLLOUT: seen.generation, Role.INFERENCE: seen.inferring}
    return any(picture is None and assigned[role] is None for role, picture in pictures.items())
