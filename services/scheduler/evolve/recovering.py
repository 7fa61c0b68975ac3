"""Recovers a state that the store lost, or of which it returned an older version, from the stream's events. Pure.

The stream has all events after the state, or after its copy. It does not have what only the store had: the open
iteration, the transitions, the issued commands. So the recovery works in these steps:
1. Fold the events again. An iteration counts as open once a report of it comes, and as closed once its accounts add up.
2. Take down all components and forget what was issued.
3. Start a new incarnation from the last checkpoint. It supersedes the work that was not finished.

Invariants:
- The new incarnation is above the incarnation of every event. [test_recovering: restarts_before_the_state_was_lost]
- No component works afterwards, so the scheduler queries the gates of its GPUs.
  [test_recovering: made_again_up_to_the_last_checkpoint]
- A fatal failure that is read again ends no job. It may have come too late to end it, which the lost state alone knew.
  A cause that remains fails the job again. [test_recovering: failure_that_is_read_again_ends_no_job]
- A job that was ending still ends. [test_recovering: was_ending_still_ends]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.evolve import iterations
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.losses import all_down, next_incarnation, restart_point
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.course import Iteration
from tidegate.types import Role


def recovered(state: ClusterState, missed: Sequence[ev.Event]) -> ClusterState:
    """The state after `missed`: events after `state.applied_seq` that only the lost state had folded."""
    highest = max([state.incarnation, *(event.incarnation for event in missed)])
    for event in missed:
        state = _replay(state, event)
    if state.spec is None:
        return state
    state = replace(state, components=all_down(state), expectations={}, version=state.version + 1)
    if state.phase in OVER:
        return state
    state = next_incarnation(state, incarnation=highest + 1)
    if state.phase is Phase.PAUSED:
        return state
    num_read, where = len(missed), restart_point(state)
    message = f"the store lost the job's state; {num_read} events were read again, and it goes on from {where}"
    return replace(state, phase=Phase.STARTING, message=message)


def _replay(state: ClusterState, event: ev.Event) -> ClusterState:
    if state.spec is not None and role_of_instance(event.source) and event.incarnation > state.incarnation:
        # The actor restarted. The decision to restart it was in the lost state alone.
        num_restarts = state.num_restarts + event.incarnation - state.incarnation
        state = replace(next_incarnation(state, incarnation=event.incarnation), num_restarts=num_restarts)
    if _is_rank_death(event) or (isinstance(event.body, ev.Failed) and event.body.fatal):
        return replace(state, applied_seq=event.stream_sequence or state.applied_seq)
    state = evolve(_opened(state, event), event)
    iteration = state.iteration
    if iteration is None or not iteration.is_accounted:
        return state
    return iterations.advance(replace(state, iteration=replace(iteration, closed=tuple(Role))))


def _is_rank_death(event: ev.Event) -> bool:
    """The iteration may have survived such a death. If it did not, later events have a later incarnation."""
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
