"""The scheduler's commands as frozen values: to a component's lead, to the store, to a node's gate and to itself.

Invariants:
- The purpose of a command determines its id, so the receiver recognises a repeat.
  [test_expectations: then_under_the_same_id]
- Events show the effect of a command in the state, so the scheduler does not issue it again.
  [test_lifecycle: undisturbed_job_is_issued_once]
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
    """Where an instance answers. `boot` says which start of the instance the command is for."""

    instance: InstanceId
    endpoint: str
    boot: int


@dataclass(frozen=True, slots=True)
class Header:
    """Addresses the lead at `endpoint`. `members` are the grants that the component holds now, in rank order."""

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
    """The component gets `grants`. `members` are all its GPUs afterwards, in rank order.

    An empty `checkpoint` means a start from the beginning. An actor that already has other members keeps its state and
    continues with all of them.
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
    """The component gives up `grants`. `members` and `layout` describe what remains. A layout of None: nothing remains.

    Without a transition, the command cleans up after a failed start: the grants are lost, but living workers still hold
    their gates.
    """

    header: Header
    grants: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Migrate:
    """To a working actor: replace `leaving` by `coming`, or change the layout or the order of the same GPUs."""

    header: Header
    leaving: tuple[Grant, ...]
    coming: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Suspend:
    """To an actor: release `grants`, which are all its GPUs, and keep the state in the memory of its nodes."""

    header: Header
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """To a suspended actor: take `grants`, in rank order, and continue from the state in memory."""

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
    """`iteration` is the number of the open iteration. After the last iteration it is the number of iterations."""

    header: Header
    iteration: int
    version: int


@dataclass(frozen=True, slots=True)
class HoldTraining:
    """To the actor. `holds`: the actor must not begin another minibatch of the iteration."""

    header: Header
    iteration: int
    holds: bool


@dataclass(frozen=True, slots=True)
class OrderGroups:
    """To the rollout: the order in which the iteration's prompts go to engines. Its first prompt is 0."""

    header: Header
    iteration: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanTransition:
    """Store: `plan`. Save the state first: the store compares `planned_version` with the version of the saved state.

    The state keeps `target`, because a record of moves has no rank order. None: the component stops.
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
    """Store: `reclaim` of a lost GPU after its gate or its holder reported that it is free."""

    id: CommandId
    gpu: GpuId
    token: Token


@dataclass(frozen=True, slots=True)
class AskGate:
    """Ask the gate of the GPU's node through any living instance on that node.

    The answer is a `GateReported` in an event whose `grants` are `(grant,)`. An answer about an earlier grant says
    nothing about this one. `is_needed`: the job ends where no answer says in time that the GPU is free, because a
    component cannot work without it, or a worker that was told to leave it holds it. Otherwise the component continues
    with the GPUs that it has.
    """

    id: CommandId
    node: NodeId
    grant: Grant
    endpoints: tuple[str, ...]
    is_needed: bool


@dataclass(frozen=True, slots=True)
class Await:
    """Sends nothing: the scheduler waits for an action of somebody else. After `wait_ms` it gives up."""

    id: CommandId
    what: str
    wait_ms: int


@dataclass(frozen=True, slots=True)
class StopJob:
    """The scheduler's own decision to end the job as `outcome`. `expectations.issued` folds it into the state."""

    id: CommandId
    outcome: Phase
    message: str


@dataclass(frozen=True, slots=True)
class FinishJob:
    """The job is over: no part of it still runs. `expectations.issued` folds this into the state."""

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
