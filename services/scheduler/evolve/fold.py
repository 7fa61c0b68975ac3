"""`evolve(state, event)`: the state after an event. Total, pure and idempotent; decides nothing that costs anything.

Order: admission (each event once), a source's new start (its old one is dead), refusals, the event itself, then what
follows from the state alone: an iteration opens when weights are held, closes when every component closed it.

Invariants:
- an event seen twice, late, or of something superseded changes only what is counted in `ignored`;
- `version` grows by one with each event that counts, except progress, backlog and pictures of an iteration, and
  ownership read unchanged;
- no event that is well formed raises.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve import (
    absences,
    evaluations,
    iterations,
    lifecycle,
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
from services.scheduler.state.course import ProgressSeen
from services.scheduler.state.observed import Generation, Inferring, Picture, Training

_FIGURES = ev.Progress | ev.Backlog | Picture
"""Nothing that a transition was planned on changes with them."""


def evolve(state: ClusterState, event: ev.Event) -> ClusterState:
    """The state after the event."""
    admitted = admit(state, event)
    if isinstance(admitted, Refused):
        return _applied(_ignored(state, admitted), event)
    met = membership.meet(admitted, event)
    folded = refusal(met, event) or _fold(met, event)
    after = iterations.advance(_ignored(met, folded) if isinstance(folded, Refused) else folded)
    after = absences.still(after, state)
    folds_figures = isinstance(event.body, _FIGURES) and met is admitted
    if not folds_figures and replace(after, ignored=admitted.ignored) != admitted:
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
            return _seen(state, event)
        case Generation() | Inferring() | Training():
            return pictures.told(state, event, body)
        case (
            ev.JobSubmitted()
            | ev.JobCancelRequested()
            | ev.JobResumeRequested()
            | ev.DeadLettered()
            | ev.CheckpointSaved()
        ):
            return lifecycle.told(state, event, body)
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
            # Tells people how far a start is; the layout's commit says all that a decision needs.
            return state
        case ev.GpusReleased():
            return ownership.released(state, event, body)
        case ev.LayoutCommitted():
            return ownership.committed(state, event, body)
        case ev.ResizeRequested():
            return resizes.requested(state, body)
        case ev.ResizeFailed():
            return resizes.failed(state, event, body)
        case ev.GateReported():
            return ownership.gate_reported(state, event, body)
        case ev.OwnershipObserved():
            return ownership.observed(state, body)


def _seen(state: ClusterState, event: ev.Event) -> ClusterState | Refused:
    role = role_of_instance(event.source)
    match event.body:
        case ev.Backlog(queue=queue, num_messages=num_messages):
            return replace(state, backlog=dict(sorted({**state.backlog, queue: num_messages}.items())))
        case ev.Progress() as progress if role is not None:
            seen = ProgressSeen(
                incarnation=event.incarnation,
                iteration=event.iteration,
                phase=progress.phase,
                num_done=progress.num_done,
                num_total=progress.num_total,
                metrics=progress.metrics,
            )
            return replace(state, progress={**state.progress, role: seen})
        case _:
            return Refused("progress of no component")
