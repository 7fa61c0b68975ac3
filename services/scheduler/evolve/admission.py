"""Decides which events may change the state.

An event must pass these checks, in this order:
1. It belongs to this job.
2. Its sequence in the stream was not applied before.
3. Its source's start and sequence are new.
4. Its incarnation is the present one.
5. Its source leads the component.
6. Its tokens are not older than those of the records.

Invariants:
- An event is admitted at most once, in whatever order events arrive. [test_fold: count_once_each_in_whatever_order]
- A refusal names its reason. Reasons are few, so they can be counted. [test_fold: refused_changes_only_the_count]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, SourceClock
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.observed import Generation, Inferring, Training
from tidegate.types import Grant

MAX_AHEAD = 64
"""How many sequences the state remembers after a gap. Sources publish in order and retry at once, so a gap is a few
events long. Beyond this number, the missing event counts as never published."""

NOT_OF_LEAD = "not of the component's lead"

_OF_ITS_WORK = (
    ev.WeightsPublished,
    ev.WeightsLoaded,
    ev.IterationReported,
    ev.EvaluationReported,
    ev.CheckpointSaved,
    Generation,
    Inferring,
    Training,
)
_OF_ONE_INCARNATION = (ev.Progress, ev.Backlog, *_OF_ITS_WORK)
_OF_THE_LEAD = (ev.LayoutCommitted, ev.ResizeFailed, *_OF_ITS_WORK)

_OF_NO_GPU = (ev.WeightsPublished, ev.IterationReported, ev.EvaluationReported, ev.CheckpointSaved)
"""Events about work of a component in an incarnation, under its lead. They count even after its GPUs changed owner."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The event changes nothing. `reason` has no numbers, because equal reasons are counted."""

    reason: str


def admit(state: ClusterState, event: ev.Event) -> ClusterState | Refused:
    """The state that knows the event's sequence, or why the event must not count."""
    if event.job != state.job:
        return Refused("of another job")
    if event.stream_sequence is not None and event.stream_sequence <= state.applied_seq:
        return Refused("applied before")
    if role_of_instance(event.source) is not None:
        clock = _tick(state.clocks.get(event.source), event)
        if isinstance(clock, Refused):
            return clock
        state = replace(state, clocks={**state.clocks, event.source: clock})
    return state


def refusal(state: ClusterState, event: ev.Event) -> Refused | None:
    """Why a new event is void. None: it counts."""
    if is_found_checkpoint(event):
        return None
    if isinstance(event.body, _OF_ONE_INCARNATION) and event.incarnation != state.incarnation:
        return of_other_incarnation(state, event)
    if isinstance(event.body, _OF_THE_LEAD) and not is_of_lead(state, event):
        return Refused(NOT_OF_LEAD)
    if isinstance(event.body, _OF_NO_GPU):
        return None
    if event.grants and all(is_stale(state, grant) for grant in event.grants):
        return Refused("under old tokens")
    return None


def is_found_checkpoint(event: ev.Event) -> bool:
    """Whether a launcher reports a checkpoint that it found in the job's folder.

    It does so before it submits the job again: the actor that saved the checkpoint may be dead, and the state that knew
    of the checkpoint may be lost.
    """
    return isinstance(event.body, ev.CheckpointSaved) and role_of_instance(event.source) is None


def of_other_incarnation(state: ClusterState, event: ev.Event) -> Refused:
    return Refused("of an older incarnation" if event.incarnation < state.incarnation else "of a later incarnation")


def is_of_lead(state: ClusterState, event: ev.Event) -> bool:
    """Whether the source leads its component, as far as the state knows."""
    role = role_of_instance(event.source)
    lead = state.components[role].lead if role else None
    return lead is not None and lead.instance == event.source


def is_stale(state: ClusterState, grant: Grant) -> bool:
    """Whether the store has granted the GPU again since."""
    record = state.gpus.get(grant.gpu)
    return record is not None and grant.token < record.token


def _tick(clock: SourceClock | None, event: ev.Event) -> SourceClock | Refused:
    if clock is None or event.boot > clock.boot:
        clock = SourceClock(boot=event.boot)
    if event.boot < clock.boot:
        return Refused("of an older start of its source")
    if event.sequence <= clock.through or event.sequence in clock.ahead:
        return Refused("seen before")
    ahead = sorted((*clock.ahead, event.sequence))
    through = clock.through
    while ahead and (ahead[0] == through + 1 or len(ahead) > MAX_AHEAD):
        through = ahead.pop(0)
    return SourceClock(boot=clock.boot, through=through, ahead=tuple(ahead))
