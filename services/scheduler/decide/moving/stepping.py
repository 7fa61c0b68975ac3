"""The steps of a transition as commands to the store, and what is asked of GPUs before one is planned. Pure.

Invariant: a step's id is derived from its transition and what it changes, so that every replica names it alike.
"""

from __future__ import annotations

from services.scheduler.decide.expectations import MAX_ISSUES
from services.scheduler.decide.wanted import Wanted
from services.scheduler.evolve.answers import command_deadline_ms
from services.scheduler.evolve.ownership import transition_id
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Target, node_of_instance
from tidegate.ownership.records import GpuRecord, Move, MoveState, Part, Transition
from tidegate.ownership.transitions import earned_outcome
from tidegate.types import CommandId, Layout, NodeId, Role

TRANSITION_DEADLINES = MAX_ISSUES + 1
"""Command deadlines that a transition has. A lead that hangs ends the job one earlier, with the words of what it was
asked; this ends what goes on for longer: leads that keep changing, a step that the store keeps refusing."""

MIN_TRANSITION_MS = 180_000
"""However short the command deadline: a lead that never answers is given up after two minutes, and what a scheduler
that died had asked of the store is asked again after seconds."""

CHANGE_DEADLINES = 2
"""Command deadlines that a change of a component that works has. One fewer than end the job for a lead without effect:
an update that takes longer than this costs the change, not the job."""


def change_deadline_ms(state: ClusterState) -> int:
    return CHANGE_DEADLINES * command_deadline_ms(state)


def close(transition: Transition) -> Wanted:
    """As it is: not released stays, released is free, handed out is lost until its gate says that nobody holds it."""
    outcome = earned_outcome(transition)
    command = cmd.CloseTransition(CommandId(f"{transition.id}/close"), transition.id, outcome)
    return Wanted((command,), (f"ends {transition.id} {outcome} ({len(transition.moves)} GPUs)",))


def advance(transition: Transition, move: Move, to_state: MoveState) -> cmd.AdvanceMove:
    key = CommandId(f"{transition.id}/{to_state}/{move.gpu}")
    return cmd.AdvanceMove(key, transition.id, move.gpu, move.state, to_state)


def commit(transition: Transition, role: Role, layout: Layout | None) -> Wanted:
    command = cmd.CommitPart(CommandId(f"{transition.id}/commit/{role}"), transition.id, role, layout)
    return Wanted((command,), (f"commits the {role}'s layout {layout or 'none'}",))


def described(record: GpuRecord) -> str:
    owner = f" of {record.owner}" if record.owner else ""
    return f"{record.gpu} {record.state}{owner}"


def nodes_of(state: ClusterState, role: Role) -> set[NodeId]:
    return {node_of_instance(name) for name in state.living(role=role)}


def plan(
    state: ClusterState,
    moves: tuple[Move, ...],
    part: Part,
    *,
    reason: str,
    now_ms: int,
    deadline_ms: int | None = None,
    target: Target | None = None,
) -> Wanted:
    """`deadline_ms` from now; None gives it as long as a start or a stop may take. `target`: None is a stop's."""
    if deadline_ms is None:
        deadline_ms = max(MIN_TRANSITION_MS, TRANSITION_DEADLINES * command_deadline_ms(state))
    transition = Transition(
        id=transition_id(state),
        job=state.job,
        incarnation=state.incarnation,
        moves=moves,
        parts=(part,),
        planned_version=state.version,
        deadline_unix_ms=now_ms + deadline_ms,
        reason=reason,
    )
    command = cmd.PlanTransition(CommandId(f"{transition.id}/plan"), transition, target)
    return Wanted((command,), (f"plans {transition.id}: {reason}",))
