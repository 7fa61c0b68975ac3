"""Folds what a person asks for by hand: a split of the job's GPUs over its components, and GPUs to drain. Pure.

A split says where each component is to be. It comes into force with the actor's resize:
1. The rollout and the inference give up the GPUs that the split takes from them.
2. The actor resizes, as a person asked (`resizes`).
3. The split is in force: it is the home of each component. What the actor gave up is there for the others.
A split in which the actor stays is in force at once.

A drained GPU is in no home. Its owner gives it back, and nobody gets it until a person gives it back to the job.

Invariants:
- A split whose actor cannot get there is undone: the others return to where they were at home.
  [test_manual_moves: whose_actor_cannot_get_there_is_undone]
- Homes never share a GPU, whatever fails on the way. [test_manual_moves: homes_share_no_gpu]
- The last request counts: it replaces a split that is not in force. [test_manual_moves: later_request_replaces]
- A split whose resize commits is in force whole, also where a later request or a drain took its place meanwhile.
  [test_manual_moves: though_a_drain_took_its_place] [test_manual_moves: though_the_next_split_fails]
- A request for the actor on GPUs that a split has given to others meanwhile is dropped.
  [test_manual_moves: given_to_others_meanwhile]
- Drained GPUs stay drained over restarts of the actor and a resume. [test_manual_moves: stay_drained]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.scheduler.evolve import resizes
from services.scheduler.evolve.admission import Refused
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState
from services.scheduler.state.components import Working
from services.scheduler.state.homes import DONORS, home_spec, split_in_force
from services.scheduler.state.layouts import comes, stays
from services.scheduler.state.manual_moves import ManualMoves
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Role


def split_requested(state: ClusterState, body: ev.SplitRequested) -> ClusterState | Refused:
    if state.phase in OVER:
        return Refused("the job is ending")
    if state.spec is None or split_fault(state, body.placement) is not None:
        return Refused("asks for a split that cannot be")
    asked = replace(state, manual=replace(state.manual, split=body.placement, held=None))
    return settled(resizes.asked_for(asked, body.placement[Role.ACTOR]))


def split_fault(state: ClusterState, placement: Mapping[Role, Placed]) -> str | None:
    """Why the components can never be there; None when they can. Layouts are not checked."""
    assert state.spec is not None, "a job without a config has no GPUs"
    gpus = [gpu for role in Role for gpu in (placement[role].gpus if role in placement else ())]
    if missing := [role for role in Role if role not in placement or not placement[role].gpus]:
        return f"{' and '.join(missing)} would have no GPU; every component needs one copy"
    if len(set(gpus)) < len(gpus):
        twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
        return f"{', '.join(twice)} would have two components; give each GPU to one"
    if strange := sorted(set(gpus).difference(state.spec.gpus)):
        return f"{', '.join(strange)}: no GPU of the job, which has {', '.join(state.spec.gpus)}"
    if (fault := drained_fault(state, gpus)) is not None:
        return fault
    for role, placed in placement.items():
        if placed.layout.num_ranks != len(placed.gpus):
            return f"the {role} would have {len(placed.gpus)} GPUs for the {placed.layout.num_ranks} of {placed.layout}"
    return None


def drained_fault(state: ClusterState, gpus: Iterable[GpuId]) -> str | None:
    """Why no component can get these GPUs now; None where none of them is drained."""
    drained = sorted(set(gpus).intersection(state.manual.drained))
    if not drained:
        return None
    return f"{', '.join(drained)}: drained by hand; `tidegate drain JOB {drained[0]} --undo` gives it back first"


def drain_requested(state: ClusterState, body: ev.DrainRequested) -> ClusterState | Refused:
    if state.phase in OVER:
        return Refused("the job is ending")
    if state.spec is None or not set(body.gpus) <= set(state.spec.gpus):
        return Refused("drains GPUs that the job does not have")
    before = set(state.manual.drained)
    after = before.difference(body.gpus) if body.is_undone else before.union(body.gpus)
    drained = tuple(sorted(after))
    return settled(replace(state, manual=replace(state.manual, drained=drained)))


def resubmitted(state: ClusterState, spec: JobSpec) -> ManualMoves:
    """What outlives a new submission: the drained GPUs that the job still has."""
    return ManualMoves(drained=tuple(gpu for gpu in state.manual.drained if gpu in spec.gpus))


def settled(state: ClusterState) -> ClusterState:
    """The state after what a person asked for came into force, or became impossible."""
    return _without_impossible_wishes(_split_settled(_actor_settled(_without_lost_wishes(state))))


def open_places(state: ClusterState) -> tuple[tuple[Role, Placed], ...]:
    """Where persons asked for components that are not there yet: the actor's requests, and the others' places in the
    split that is asked for, else in the one that is in force. A place with GPUs that nobody gets is not open."""
    actor = [(Role.ACTOR, placed) for placed in resizes.open_requests(state)]
    wanted, closed = state.manual.split or state.manual.homes, _closed(state)
    others = [(role, wanted[role]) for role in DONORS if role in wanted and closed.isdisjoint(wanted[role].gpus)]
    return (*actor, *((role, placed) for role, placed in others if not _is_there(state, role, placed)))


def with_split_under_way(state: ClusterState) -> ClusterState:
    """The state in which the split is in force whose resize is under way; the state itself without such a resize."""
    transition = state.resize()
    target = state.targets.get(transition.id) if transition is not None else None
    return split_in_force(state, target.split) if target is not None and target.split else state


def is_held(state: ClusterState) -> bool:
    """Whether a split came into force in the open iteration."""
    iteration = state.iteration
    return iteration is not None and state.manual.held == (state.incarnation, iteration.plan.iteration)


def _is_there(state: ClusterState, role: Role, placed: Placed) -> bool:
    component = state.components[role]
    if not component.is_up or state.transition_of(role) is not None:
        return False
    num_staying = sum(len(each) for each in stays(component, placed))
    return not comes(component, placed) and num_staying == len(component.grants)


def _closed(state: ClusterState) -> set[GpuId]:
    """GPUs that are drained, or that the job goes on without."""
    return {*state.manual.drained, *(gpu for gpu, absence in state.absent.items() if absence.is_long)}


def _without_lost_wishes(state: ClusterState) -> ClusterState:
    """The state without requests for GPUs that nobody gets."""
    shut = _closed(state)
    if not shut:
        return state

    def is_shut(placed: Placed | None) -> bool:
        return placed is not None and not shut.isdisjoint(placed.gpus)

    split = state.manual.split
    if any(map(is_shut, split.values())):
        actor = split[Role.ACTOR]
        state = replace(
            state,
            manual=replace(state.manual, split={}),
            asked=None if state.asked == actor else state.asked,
            asked_next=None if state.asked_next == actor else state.asked_next,
        )
    return replace(
        state,
        asked=None if is_shut(state.asked) else state.asked,
        asked_next=None if is_shut(state.asked_next) else state.asked_next,
    )


def _without_impossible_wishes(state: ClusterState) -> ClusterState:
    """The state without requests for an actor on GPUs of others: a split has come into force since the request."""
    spec = state.spec
    if spec is None or (state.asked is None and state.asked_next is None):
        return state
    home, of_split = home_spec(state, spec), state.manual.split.get(Role.ACTOR)

    def is_possible(placed: Placed | None) -> bool:
        return placed is None or placed == of_split or resizes.fault(home, placed) is None

    # The resize that is under way was checked when it was planned.
    is_kept = state.resize() is not None or is_possible(state.asked)
    return replace(
        state,
        asked=state.asked if is_kept else None,
        asked_next=state.asked_next if is_possible(state.asked_next) else None,
    )


def _actor_settled(state: ClusterState) -> ClusterState:
    """The actor may get where a person asked for it without a resize: it starts or resumes there."""
    asked, at_work = state.asked, state.components[Role.ACTOR].state
    is_there = asked is not None and isinstance(at_work, Working) and at_work.placed == asked
    if asked is None or not is_there or state.changing(Role.ACTOR) is not None:
        return state
    return resizes.asked_for(state, asked)


def _split_settled(state: ClusterState) -> ClusterState:
    manual = state.manual
    if not manual.split:
        return state
    actor = manual.split[Role.ACTOR]
    at_work = state.components[Role.ACTOR].state
    if state.moved == actor and isinstance(at_work, Working) and at_work.placed == actor:
        return split_in_force(state, manual.split)
    if actor in resizes.open_requests(state):
        return state
    return replace(state, manual=replace(manual, split={}))
