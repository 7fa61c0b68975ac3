"""Pictures of the open iteration folded into the state: the latest of each component, and what is learned from them.

Invariants:
- a picture counts only of the open iteration, of its incarnation (`admission`) and of the role's present lead;
- of one source a later one, by start and sequence, replaces an earlier, whatever the order in which they arrive;
- a new lead's component is not seen before that lead tells of it; with the iteration all pictures go.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve.admission import NOT_OF_LEAD, Refused
from services.scheduler.state import events as ev
from services.scheduler.state import learned
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.course import Iteration
from services.scheduler.state.observed import Generation, Inferring, Picture, Seen, Training
from tidegate.types import Role


def told(state: ClusterState, event: ev.Event, picture: Picture) -> ClusterState | Refused:
    role, iteration = role_of_instance(event.source), state.iteration
    if role is not _painter(picture):
        return Refused("a picture of another component")
    if iteration is None or event.iteration != iteration.plan.iteration:
        return Refused("of an iteration that is not open")
    lead = state.components[role].lead
    if lead is None or lead.boot != event.boot:
        return Refused(NOT_OF_LEAD)
    mark = (event.boot, event.sequence)
    if mark <= state.seen.marks.get(role, (0, 0)):
        return Refused("of an older picture")
    if isinstance(picture, Generation) and not _is_of_plan(picture, iteration):
        return Refused("a picture of other groups than the iteration's")
    seen = _marked(state.seen, role, mark)
    match picture:
        case Generation():
            seen = replace(seen, generation=picture)
        case Inferring():
            seen = replace(seen, inferring=picture)
        case Training():
            seen = replace(seen, training=picture)
    return replace(state, seen=seen, learned=_learned(state, picture))


def led_anew(seen: Seen, role: Role, mark: tuple[int, int]) -> Seen:
    """What the lead before told of the role is gone with it; `mark`: of the election, where the lead told it itself."""
    match role:
        case Role.ROLLOUT:
            seen = replace(seen, generation=None)
        case Role.INFERENCE:
            seen = replace(seen, inferring=None)
        case Role.ACTOR:
            seen = replace(seen, training=None)
    return _marked(seen, role, mark)


def _painter(picture: Picture) -> Role:
    match picture:
        case Generation():
            return Role.ROLLOUT
        case Inferring():
            return Role.INFERENCE
        case Training():
            return Role.ACTOR


def _is_of_plan(picture: Generation, iteration: Iteration) -> bool:
    plan = iteration.plan
    most = plan.num_prompts + plan.max_extra_prompts
    return picture.group_size == plan.group_size and plan.num_prompts <= picture.num_groups <= most


def _marked(seen: Seen, role: Role, mark: tuple[int, int]) -> Seen:
    return replace(seen, marks=dict(sorted({**seen.marks, role: mark}.items())))


def _learned(state: ClusterState, picture: Picture) -> learned.Learned:
    match picture:
        case Generation() if state.spec is not None:
            return learned.with_decoding(state.learned, picture, state.spec.costs.decode)
        case Training():
            return learned.with_training(state.learned, picture)
        case Inferring():
            return learned.with_inferring(state.learned, picture)
        case _:
            return state.learned
