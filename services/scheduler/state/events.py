"""The scheduler's input as frozen values: the events of the wire, and what the scheduler reads from its own store.

`shell/codecs/state_codec` makes them from `events.proto`. `observed` has the pictures that components report of an open
iteration. `OwnershipObserved` alone has no message on the wire: the shell makes it from the records of the ownership
store. The fold treats it like any other event, so a history holds every input of a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from services.scheduler.state.observed import Picture
from services.scheduler.state.values import Fate, JobSpec, Placed, Snapshot
from tidegate.ownership.records import GpuRecord, Transition
from tidegate.types import GpuId, Grant, InstanceId, Layout, NodeId, Role, Token


@dataclass(frozen=True, slots=True)
class Progress:
    metrics: tuple[tuple[str, float], ...]
    num_done: int
    num_total: int
    phase: str


@dataclass(frozen=True, slots=True)
class Backlog:
    queue: str
    num_messages: int


@dataclass(frozen=True, slots=True)
class GpusReleased:
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class GpusAcquired:
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class LayoutCommitted:
    """`grants` are all members of the layout, in rank order. Only the actor sets `next_iteration` and `next_prompt`."""

    layout: Layout
    grants: tuple[Grant, ...]
    next_iteration: int
    next_prompt: int = 0


class FailedWhat(StrEnum):
    WORKER = "worker"
    COMPONENT = "component"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class Failed:
    """A `component` without grants failed as a whole. The failure of a `sample` alone changes nothing."""

    what: FailedWhat
    grants: tuple[Grant, ...]
    exit_status: int
    message: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """`gates`: the highest token that ever passed the gate of each GPU of its node."""

    instance: InstanceId
    endpoint: str
    boot: int
    gates: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceLost:
    instance: InstanceId
    boot: int


@dataclass(frozen=True, slots=True)
class LeadElected:
    instance: InstanceId
    endpoint: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """`reference` is version 0 of the job, readable in this incarnation. None: the KL term is off."""

    snapshot: Snapshot
    reference: Snapshot | None


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class IterationReported:
    generated: Fate
    trained: Fate
    filtered: tuple[Fate, ...]
    discarded: tuple[Fate, ...]
    num_duplicates_dropped: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class EvaluationReported:
    version: int
    num_prompts: int
    samples_per_prompt: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    next_iteration: int
    version: int
    name: str
    num_samples_trained: int


@dataclass(frozen=True, slots=True)
class DeadLettered:
    subject: str
    reason: str
    dead_letter: int


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    spec: JobSpec
    config_json: str
    resume: bool


@dataclass(frozen=True, slots=True)
class JobCancelRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class JobResumeRequested:
    pass


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    """A person requests other GPUs or another layout for the working actor."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class SplitRequested:
    """A person requests these GPUs for each of the three components."""

    placement: Mapping[Role, Placed]


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A person takes GPUs away from the job; `is_undone`: gives them back to it."""

    gpus: tuple[GpuId, ...]
    is_undone: bool


@dataclass(frozen=True, slots=True)
class ResizeFailed:
    """The actor stays as it was. The event's transition is aborted."""

    message: str


@dataclass(frozen=True, slots=True)
class GateState:
    gpu: GpuId
    highest_token: Token
    held: bool


@dataclass(frozen=True, slots=True)
class GateReported:
    """A gate's report on its GPUs. It counts only for the grants in its event, which are those of the question."""

    node: NodeId
    gpus: tuple[GateState, ...]


@dataclass(frozen=True, slots=True)
class CommandAnswered:
    command_id: str
    accepted: bool
    message: str


@dataclass(frozen=True, slots=True)
class OwnershipObserved:
    """The store's records of the placement's GPUs, and the job's transitions: all that are open, and those that the
    state has as open and that were closed."""

    gpus: tuple[GpuRecord, ...]
    transitions: tuple[Transition, ...]


Figure: TypeAlias = Progress | Backlog | Picture
"""Bodies that the source's next ones replace. They change nothing on which a transition was planned, and a stream keeps
the last of each: a reader that lost one gets a later one, or the same one again."""

Body = (
    Progress
    | Backlog
    | GpusReleased
    | GpusAcquired
    | LayoutCommitted
    | Failed
    | InstanceJoined
    | InstanceLost
    | LeadElected
    | WeightsPublished
    | WeightsLoaded
    | IterationReported
    | EvaluationReported
    | CheckpointSaved
    | DeadLettered
    | JobSubmitted
    | JobCancelRequested
    | JobResumeRequested
    | ResizeRequested
    | ResizeFailed
    | SplitRequested
    | DrainRequested
    | GateReported
    | CommandAnswered
    | OwnershipObserved
    | Picture
)


@dataclass(frozen=True, slots=True)
class Event:
    """`stream_sequence` is None if the event is not from the job's stream. `role` is None if it has no component."""

    job: str
    source: str
    boot: int
    sequence: int
    body: Body
    incarnation: int = 0
    iteration: int = 0
    transition_id: str = ""
    grants: tuple[Grant, ...] = ()
    role: Role | None = None
    stream_sequence: int | None = None
