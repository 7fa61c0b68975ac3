"""What to go on from when the store lost the state, or gave back an older one: the stream's events, told again. Pure.

The stream has all that happened and nothing of what the store held: which iteration was open, which transitions, which
commands were asked. So the events are folded as far as they speak for themselves, an iteration is taken as opened and
closed where its accounts are in, and what was under way is superseded by a new incarnation from the last checkpoint.

Invariants: the new incarnation is above every one that an event shows; no component works under what it had, so that
its GPUs are asked for at their gates; a job that was ending goes on ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.evolve import iterations
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.losses import all_down, next_incarnation
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.course import Iteration
from tidegate.types import Role


def recovered(state: ClusterState, missed: Sequence[ev.Event]) -> ClusterState:
    """`state` after events that another state had seen, which is lost. They begin after `state.applied_seq`."""
    for event in missed:
        state = _told_again(state, event)
    if state.spec is None:
        return state
    state = replace(state, components=all_down(state), expectations={}, version=state.version + 1)
    if state.phase in OVER:
        return state
    seen = max([state.incarnation, *(event.incarnation for event in missed)])
    state = next_incarnation(state, incarnation=seen + 1)
    if state.phase is Phase.PAUSED:
        return state
    where = f"checkpoint {state.checkpoint.name}" if state.checkpoint else "the beginning: there is no checkpoint yet"
    message = f"the store lost the job's state; {len(missed)} events were read again, and it goes on from {where}"
    return replace(state, phase=Phase.STARTING, message=message)


def _told_again(state: ClusterState, event: ev.Event) -> ClusterState:
    if state.spec is not None and role_of_instance(event.source) and event.incarnation > state.incarnation:
        # A restart: what brought it about was decided on what is lost.
        num_restarts = state.num_restarts + event.incarnation - state.incarnation
        state = replace(next_incarnation(state, incarnation=event.incarnation), num_restarts=num_restarts)
    if _is_rank_death(event):
        return replace(state, applied_seq=event.stream_sequence or state.applied_seq)
    state = evolve(_opened(state, event), event)
    iteration = state.iteration
    if iteration is None or not iteration.is_accounted:
        return state
    return iterations.advance(replace(state, iteration=replace(iteration, closed=tuple(Role))))


def _is_rank_death(event: ev.Event) -> bool:
    """The iteration may have outlived it; where it did not, later events are of a later incarnation."""
    is_death = isinstance(event.body, ev.Failed) and event.body.what is ev.FailedWhat.WORKER
    return is_death and role_of_instance(event.source) is Role.ACTOR


def _opened(state: ClusterState, event: ev.Event) -> ClusterState:
    """A report of the next iteration shows that it was opened."""
    is_next = (event.incarnation, event.iteration) == (state.incarnation, state.next_iteration)
    if state.spec is None or state.phase in OVER or state.iteration is not None or not is_next:
        return state
    if not isinstance(event.body, ev.IterationReported):
        return state
    plan = state.spec.plan(iteration=state.next_iteration, version=state.next_version, first_prompt=state.next_prompt)
    phase = Phase.RUNNING if state.phase is Phase.SUBMITTED else state.phase
    return replace(state, phase=phase, iteration=Iteration(plan=plan))
