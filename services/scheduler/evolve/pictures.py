"""Folds pictures of the open iteration into the state: the latest of each component, and the measurements in them.

Invariants:
- A picture counts only if it is from the open iteration, its incarnation (`admission`) and the role's present lead.
  [test_pictures: picture_that_does_not_count_changes_nothing]
- A later picture of a source, by start and sequence, replaces an earlier one in whatever order they arrive.
  [test_pictures: whatever_the_order_in_which_they_arrive]
- After an election, a component has no picture until its new lead reports one.
  [test_pictures: replaced_leads_picture_is_forgotten]
- The pictures end with their iteration. [test_pictures: forgotten_with_their_iteration]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve.admission import NOT_OF_LEAD, Refused
from services.scheduler.state import events as ev
from services.scheduler.state import learned
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.course import Iteration
from services.scheduler.state.observed import Generation, Inferring, Picture, Pictures, Training
from tidegate.types import Role


def folded(state: ClusterState, event: ev.Event, picture: Picture) -> ClusterState | Refused:
    role, iteration = role_of_instance(event.source), state.iteration
    if role is not _reporter(picture):
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


def with_new_lead(seen: Pictures, role: Role, mark: tuple[int, int]) -> Pictures:
    """Drops the picture of the role's earlier lead. `mark` is that of the new lead's election."""
    match role:
        case Role.ROLLOUT:
            seen = replace(seen, generation=None)
        case Role.INFERENCE:
            seen = replace(seen, inferring=None)
        case Role.ACTOR:
            seen = replace(seen, training=None)
    return _marked(seen, role, mark)


def _reporter(picture: Picture) -> Role:
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


def _marked(seen: Pictures, role: Role, mark: tuple[int, int]) -> Pictures:
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
