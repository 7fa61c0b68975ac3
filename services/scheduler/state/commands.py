"""What the scheduler asks for, as frozen values: of a component's lead, of the store, of a node's gate, of itself.

Invariants: every command has an id derived from what it is for, so that a repeat is recognised; what it asks for shows
in the state once done, by events, so that it is then no longer wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state.cluster_state import Phase
from services.scheduler.state.components import Target
from services.scheduler.state.values import IterationPlan, Snapshot
from tidegate.ownership.records import MoveState, Outcome, Transition
from tidegate.types import CommandId, GpuId, Grant, InstanceId, JobId, Layout, NodeId, Role, Token, TransitionId


@dataclass(frozen=True, slots=True)
class Address:
    """Where an instance answers, in the start of it that is meant."""

    instance: InstanceId
    endpoint: str
    boot: int


@dataclass(frozen=True, slots=True)
class Header:
    """To the lead at `endpoint`. `members` is what the component holds now, in rank order."""

    id: CommandId
    job: JobId
    incarnation: int
    role: Role
    endpoint: str
    lead_epoch: int
    deadline_ms: int
    instances: tuple[Address, ...]
    members: tuple[Grant, ...]
    transition_id: str = ""


@dataclass(frozen=True, slots=True)
class ScaleUp:
    """`grants` come; `members` are all GPUs of the component afterwards, in rank order. An empty checkpoint: anew.

    An actor that has members besides keeps its state and works on with all of them.
    """

    header: Header
    grants: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout
    weights: Snapshot | None
    reference: Snapshot | None
    checkpoint: str


@dataclass(frozen=True, slots=True)
class ScaleDown:
    """`grants` go; `members` and `layout` are what is left, None is nothing.

    Without a transition it clears up after a failed start: the grants are lost, their gates held by living workers.
    """

    header: Header
    grants: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Migrate:
    """To an actor that works: `leaving` go and `coming` come, or the same GPUs change their layout or order."""

    header: Header
    leaving: tuple[Grant, ...]
    coming: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Suspend:
    """To an actor: `grants`, all that it has, go; its state is kept in its nodes' memory."""

    header: Header
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """To a suspended actor: `grants` come, in rank order, and it goes on from the state that was kept."""

    header: Header
    grants: tuple[Grant, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class LoadWeights:
    header: Header
    weights: Snapshot
    reference: Snapshot | None


@dataclass(frozen=True, slots=True)
class OpenIteration:
    header: Header
    plan: IterationPlan


@dataclass(frozen=True, slots=True)
class CloseIteration:
    header: Header
    iteration: int
    last: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """`iteration`: the open one; after the last one, their number."""

    header: Header
    iteration: int
    version: int


@dataclass(frozen=True, slots=True)
class HoldTraining:
    """To the actor: whether it begins no minibatch of the iteration any more."""

    header: Header
    iteration: int
    holds: bool


@dataclass(frozen=True, slots=True)
class OrderGroups:
    """To the rollout: in which order the iteration's prompts go to engines, counted from its first."""

    header: Header
    iteration: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanTransition:
    """Store: `plan`. Save the state first: the store compares `planned_version` with the saved one.

    `target` stays in the state: rank order, which a record of moves does not hold. None: the component stops.
    """

    id: CommandId
    transition: Transition
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class AdvanceMove:
    """Store: `advance` of one GPU."""

    id: CommandId
    transition_id: TransitionId
    gpu: GpuId
    from_state: MoveState
    to_state: MoveState


@dataclass(frozen=True, slots=True)
class CommitPart:
    """Store: `commit` of one component's layout."""

    id: CommandId
    transition_id: TransitionId
    role: Role
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class CloseTransition:
    """Store: `close`."""

    id: CommandId
    transition_id: TransitionId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class MarkLost:
    """Store: `mark_lost`."""

    id: CommandId
    gpu: GpuId
    token: Token


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Store: `reclaim` of a lost GPU that its gate, or its holder, says is free."""

    id: CommandId
    gpu: GpuId
    token: Token


@dataclass(frozen=True, slots=True)
class AskGate:
    """Ask the gate of the GPU's node through any living instance on it. The answer comes as `GateReported`, in an event
    whose `grants` are this one: an answer about an earlier grant says nothing.

    `is_needed`: a component cannot work before it; else it goes on with the GPUs that it has.
    """

    id: CommandId
    node: NodeId
    grant: Grant
    endpoints: tuple[str, ...]
    is_needed: bool


@dataclass(frozen=True, slots=True)
class Await:
    """Nothing to send: wait for what only others can do; still wanted after `wait_ms`, it is given up."""

    id: CommandId
    what: str
    wait_ms: int


@dataclass(frozen=True, slots=True)
class StopJob:
    """The scheduler's own decision to end the job as `outcome`; folded into the state by `expectations.issued`."""

    id: CommandId
    outcome: Phase
    message: str


@dataclass(frozen=True, slots=True)
class FinishJob:
    """The job is over: nothing of it is left running. Folded into the state by `expectations.issued`."""

    id: CommandId
    phase: Phase
    message: str


LeadCommand = (
    ScaleUp
    | ScaleDown
    | Migrate
    | Suspend
    | Resume
    | LoadWeights
    | OpenIteration
    | CloseIteration
    | Evaluate
    | HoldTraining
    | OrderGroups
)
StoreCommand = PlanTransition | AdvanceMove | CommitPart | CloseTransition | MarkLost | Reclaim
Command = LeadCommand | StoreCommand | AskGate | Await | StopJob | FinishJob


def command_id(command: Command) -> CommandId:
    return command.header.id if isinstance(command, LeadCommand) else command.id
