"""Folds events about the whole job: submit, cancel, pause, resume, and the checkpoint of the next incarnation.

Invariants:
- A submission counts once, however often its event comes. [test_lifecycle: submission_that_comes_twice]
- A finished job goes on only with more iterations. [test_lifecycle: finished_job_goes_on]
- A resume waits for no GPU of a node that its config left out. [test_lifecycle: without_a_node_that_it_had]
- A resume takes the store's records as they are, older ones too. [test_lifecycle: that_came_back_with_older_records]
- A job that is ending keeps its outcome. [test_lifecycle: ending_keeps_its_outcome]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.scheduler.evolve.admission import Refused, is_found_checkpoint
from services.scheduler.evolve.losses import all_down, next_incarnation, restart_point
from services.scheduler.evolve.manual_moves import resubmitted
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState, Phase
from services.scheduler.state.course import Checkpoint
from services.scheduler.state.values import JobSpec
from tidegate.checkpoint_names import place_of
from tidegate.ownership.records import GpuRecord
from tidegate.types import NO_TOKEN, GpuId, node_of

Body = ev.JobSubmitted | ev.JobCancelRequested | ev.JobResumeRequested | ev.DeadLettered | ev.CheckpointSaved


def folded(state: ClusterState, event: ev.Event, body: Body) -> ClusterState | Refused:
    match body:
        case ev.JobSubmitted():
            return _submitted(state, event, body)
        case ev.JobCancelRequested():
            return _cancelled(state, body)
        case ev.JobResumeRequested():
            return _resumed(state)
        case ev.DeadLettered():
            return _paused(state, body)
        case ev.CheckpointSaved():
            return _checkpointed(state, event, body)


def _submitted(state: ClusterState, event: ev.Event, body: ev.JobSubmitted) -> ClusterState | Refused:
    submission = f"{event.source}/{event.boot}/{event.sequence}"
    if state.submission == submission:
        return Refused("submitted before")
    if state.spec is not None and not body.resume:
        return Refused("the job exists")
    if state.phase is Phase.FINISHED and body.spec.num_iterations <= state.next_iteration:
        return Refused("the job is finished")
    if not body.resume:
        state = replace(state, checkpoint=None)
    at_checkpoint = state.checkpoint.incarnation if state.checkpoint else 0
    incarnation = max(1, event.incarnation, at_checkpoint, state.incarnation + (state.spec is not None))
    restarted = next_incarnation(state, incarnation=incarnation)
    return replace(
        restarted,
        phase=Phase.SUBMITTED,
        outcome=None,
        message=f"resumes from {restart_point(restarted)}" if body.resume else "",
        spec=body.spec,
        config_json=body.config_json,
        submission=submission,
        gpus=_on_nodes_of(body.spec, state.gpus),
        components=all_down(restarted),
        reference=None,
        asked=None,
        asked_next=None,
        moved=None,
        manual=resubmitted(state, body.spec),
        num_restarts=0,
        expectations={},
    )


def _on_nodes_of(spec: JobSpec, gpus: Mapping[GpuId, GpuRecord]) -> dict[GpuId, GpuRecord]:
    """The GPUs whose gates the job's instances can ask. A resume may leave nodes out: nobody gives their GPUs back.

    Any record of the store is newer than these: it may have lost what the start before knew, whose workers are gone."""
    nodes = {node_of(gpu) for gpu in spec.gpus}
    return {gpu: replace(record, token=NO_TOKEN) for gpu, record in gpus.items() if node_of(gpu) in nodes}


def _cancelled(state: ClusterState, body: ev.JobCancelRequested) -> ClusterState | Refused:
    if state.phase in OVER:
        return Refused("the job is ending")
    return state.stopping(Phase.CANCELLED, f"cancelled: {body.reason or 'no reason given'}")


def _paused(state: ClusterState, body: ev.DeadLettered) -> ClusterState | Refused:
    if state.phase in OVER:
        return Refused("the job is ending")
    message = f"dead letter {body.dead_letter} of {body.subject}: {body.reason}; replay or drop it, and the job goes on"
    return replace(state, phase=Phase.PAUSED, message=message)


def _resumed(state: ClusterState) -> ClusterState | Refused:
    if state.phase is not Phase.PAUSED:
        return Refused("the job is not paused")
    phase = Phase.STARTING if state.iteration is None else Phase.RUNNING
    return replace(state, phase=phase, message="")


def _checkpointed(state: ClusterState, event: ev.Event, body: ev.CheckpointSaved) -> ClusterState | Refused:
    """Sets where the next incarnation begins. The present one continues unchanged."""
    known = state.checkpoint
    # A launcher knows which checkpoints the job's folder has: the one that the state knows may be gone.
    is_other = is_found_checkpoint(event) and known is not None and body.name != known.name
    if known is not None and body.next_iteration <= known.next_iteration and not is_other:
        return Refused("of an older checkpoint")
    checkpoint = Checkpoint(
        next_iteration=body.next_iteration,
        version=body.version,
        name=body.name,
        incarnation=event.incarnation,
        known_until=_known_until(state, body.name) if is_found_checkpoint(event) else None,
    )
    return replace(state, checkpoint=checkpoint)


def _known_until(state: ClusterState, name: str) -> int | None:
    place, known = place_of(name), state.checkpoint
    if place is None or place[0] <= state.incarnation:
        return None
    if known is None:
        return 0
    return known.next_iteration if known.known_until is None else min(known.known_until, known.next_iteration)
