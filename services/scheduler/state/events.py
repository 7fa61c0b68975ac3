"""What the scheduler is told, as frozen values: the wire's events and what it read from its own store.

`codec` makes them from `events.proto`. What components tell of an open iteration are the pictures of `observed`.
`OwnershipObserved` alone has no message: it is what the shell read from the ownership store, folded like any other
event so that a history holds all that a decision stood on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
    """`grants` are all members of the layout, in rank order; what is next is the actor's word."""

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
    """A `component` that names no grants failed as a whole; a `sample` changes nothing by itself."""

    what: FailedWhat
    grants: tuple[Grant, ...]
    exit_status: int
    message: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    instance: InstanceId
    endpoint: str
    boot: int


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
    """`reference`: version 0 of the job, readable in this incarnation; None when the KL term is off."""

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
    """A person wants the actor there, while it works."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class ResizeFailed:
    """The actor stays as it was; the event's transition comes to nothing."""

    message: str


@dataclass(frozen=True, slots=True)
class GateState:
    gpu: GpuId
    highest_token: Token
    held: bool


@dataclass(frozen=True, slots=True)
class GateReported:
    """What counts is what it says of the grants that its event names: those that it was asked about."""

    node: NodeId
    gpus: tuple[GateState, ...]


@dataclass(frozen=True, slots=True)
class CommandAnswered:
    command_id: str
    accepted: bool
    message: str


@dataclass(frozen=True, slots=True)
class OwnershipObserved:
    """The records of the placement's GPUs and all transitions of the job, open and closed, as the store holds them."""

    gpus: tuple[GpuRecord, ...]
    transitions: tuple[Transition, ...]


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
    | GateReported
    | CommandAnswered
    | OwnershipObserved
    | Picture
)


@dataclass(frozen=True, slots=True)
class Event:
    """`stream_sequence` is None for what did not come from the job's stream; `role` None for what has no component."""

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
