"""`evolve(state, event)`: the state after an event. The function is total, pure and idempotent. It issues no command.

The order:
1. Admission: each event counts once.
2. A new start of the source: its earlier start is dead.
3. Refusals of events that are void.
4. The event itself.
5. Consequences of the state alone: an iteration closes when every component closed it, and the next one follows.
6. Absences that are over end.
7. A person's request ends where it came into force or became impossible.

Invariants:
- An event that comes twice changes only the counts in `ignored`. [test_fold: delivered_twice_counts_once]
- An event that is late, or is about something superseded, does the same. [test_fold: refused_changes_only_the_count]
- `version` grows by one with each other event that counts. [test_fold: structural_event_raises_the_guarding_version]
- `version` stays with progress and backlog. [test_fold: without_raising_the_guarding_version]
- `version` stays with pictures of an iteration. [test_pictures: last_picture_and_the_version_stays]
- `version` stays if ownership is unchanged. [test_fold: ownership_read_unchanged]
- A well-formed event raises no error. [test_fold: every_kind_of_event_folds]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve import (
    absences,
    evaluations,
    iterations,
    lifecycle,
    manual_moves,
    membership,
    ownership,
    pictures,
    resizes,
)
from services.scheduler.evolve.admission import Refused, admit, refusal
from services.scheduler.evolve.answers import answered
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.course import ComponentProgress
from services.scheduler.state.observed import Generation, Inferring, Training


def evolve(state: ClusterState, event: ev.Event) -> ClusterState:
    """The state after the event."""
    admitted = admit(state, event)
    if isinstance(admitted, Refused):
        return _applied(_ignored(state, admitted), event)
    current = membership.meet(admitted, event)
    result = refusal(current, event) or _fold(current, event)
    after = iterations.advance(_ignored(current, result) if isinstance(result, Refused) else result)
    after = manual_moves.settled(absences.still(after, state))
    is_figure = isinstance(event.body, ev.Figure) and current is admitted
    if not is_figure and replace(after, ignored=admitted.ignored) != admitted:
        after = replace(after, version=state.version + 1)
    return _applied(after, event)


def _applied(state: ClusterState, event: ev.Event) -> ClusterState:
    if event.stream_sequence is None or event.stream_sequence <= state.applied_seq:
        return state
    return replace(state, applied_seq=event.stream_sequence)


def _ignored(state: ClusterState, refused: Refused) -> ClusterState:
    count = state.ignored.get(refused.reason, 0) + 1
    return replace(state, ignored=dict(sorted({**state.ignored, refused.reason: count}.items())))


def _fold(state: ClusterState, event: ev.Event) -> ClusterState | Refused:
    body = event.body
    match body:
        case ev.Progress() | ev.Backlog():
            return _with_progress(state, event)
        case Generation() | Inferring() | Training():
            return pictures.folded(state, event, body)
        case (
            ev.JobSubmitted()
            | ev.JobCancelRequested()
            | ev.JobResumeRequested()
            | ev.DeadLettered()
            | ev.CheckpointSaved()
        ):
            return lifecycle.folded(state, event, body)
        case ev.CommandAnswered():
            return answered(state, body) or Refused("answers a command that is not waited for")
        case ev.InstanceJoined():
            return membership.joined(state, body)
        case ev.InstanceLost():
            return membership.lost(state, event, body)
        case ev.LeadElected():
            return membership.elected(state, event, body)
        case ev.Failed():
            return membership.failed(state, event, body)
        case ev.WeightsPublished():
            return iterations.published(state, body)
        case ev.WeightsLoaded():
            return iterations.loaded(state, event, body)
        case ev.IterationReported():
            return iterations.reported(state, event, body)
        case ev.EvaluationReported():
            return evaluations.reported(state, event, body)
        case ev.GpusAcquired():
            # It shows people the progress of a start. The layout's commit has all that a decision needs.
            return state
        case ev.GpusReleased():
            return ownership.released(state, event, body)
        case ev.LayoutCommitted():
            return ownership.committed(state, event, body)
        case ev.ResizeRequested():
            return resizes.requested(state, body)
        case ev.ResizeFailed():
            return resizes.failed(state, event, body)
        case ev.SplitRequested():
            return manual_moves.split_requested(state, body)
        case ev.DrainRequested():
            return manual_moves.drain_requested(state, body)
        case ev.GateReported():
            return ownership.gate_reported(state, event, body)
        case ev.OwnershipObserved():
            return ownership.observed(state, body)


def _with_progress(state: ClusterState, event: ev.Event) -> ClusterState | Refused:
    role = role_of_instance(event.source)
    match event.body:
        case ev.Backlog(queue=queue, num_messages=num_messages):
            return replace(state, backlog=dict(sorted({**state.backlog, queue: num_messages}.items())))
        case ev.Progress() as progress if role is not None:
            latest = ComponentProgress(
                incarnation=event.incarnation,
                iteration=event.iteration,
                phase=progress.phase,
                num_done=progress.num_done,
                num_total=progress.num_total,
                metrics=progress.metrics,
            )
            return replace(state, progress={**state.progress, role: latest})
        case _:
            return Refused("progress of no component")
