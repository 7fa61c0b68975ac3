"""The steps of a transition as commands to the store. Pure.

Invariant: a step's id follows from its transition and the step's change, so that every replica gives it the same id.
[test_moves: the_same_history_and_proposals]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from services.scheduler.decide.expectations import MAX_ISSUES
from services.scheduler.decide.needs import Needs
from services.scheduler.evolve.answers import command_deadline_ms
from services.scheduler.evolve.ownership import transition_id
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Target, node_of_instance
from tidegate.ownership import transitions as rules
from tidegate.ownership.records import GpuRecord, Move, MoveState, Part, Transition
from tidegate.short_lists import counted
from tidegate.types import CommandId, GpuId, Layout, NodeId, Role, node_of

TRANSITION_DEADLINES = MAX_ISSUES + 1
"""Command deadlines that a transition has. A lead that hangs ends the job one deadline earlier, with a message that
names its command. This limit ends longer waits: leads that keep changing, a step that the store keeps refusing."""

MIN_TRANSITION_MS = 180_000
"""The least time of a transition, however short the command deadline. A lead that never answers is given up after two
minutes. Commands to the store that a scheduler did not carry out before it died are issued again after seconds."""

CHANGE_DEADLINES = 2
"""Command deadlines that a change of a working component has. One more and a lead without effect ends the job: an
update that takes longer than this costs the change, not the job."""


def change_deadline_ms(state: ClusterState) -> int:
    return CHANGE_DEADLINES * command_deadline_ms(state)


def close(transition: Transition) -> Needs:
    """Close it as it is. GPUs that are not released stay, and released ones are free. GPUs that were handed out are
    lost until their gate says that nobody holds them."""
    outcome = rules.earned_outcome(transition)
    command = cmd.CloseTransition(CommandId(f"{transition.id}/close/{outcome}"), transition.id, outcome)
    return Needs((command,), (f"ends {transition.id} {outcome} ({counted(len(transition.moves), 'GPU')})",))


def advance(transition: Transition, move: Move, to_state: MoveState) -> cmd.AdvanceMove:
    key = CommandId(f"{transition.id}/{to_state}/{move.gpu}")
    return cmd.AdvanceMove(key, transition.id, move.gpu, move.state, to_state)


def commit(transition: Transition, role: Role, layout: Layout | None) -> Needs:
    command = cmd.CommitPart(CommandId(f"{transition.id}/commit/{role}"), transition.id, role, layout)
    return Needs((command,), (f"commits the {role}'s layout {layout or 'none'}",))


def foreseen(state: ClusterState, commands: Sequence[cmd.Command]) -> ClusterState | None:
    """The state once the store has done the commands. None where it cannot be known before: without a command, after
    one to anybody else, after a step that the store's rules refuse, and after one that grants tokens."""
    for together in _together(commands):
        try:
            change = _change(state, together)
        except rules.REFUSALS:
            return None
        if change is None:
            return None
        transitions = {**state.transitions, change.transition.id: change.transition}
        gpus = {**state.gpus, **{record.gpu: record for record in change.gpus}}
        state = replace(state, transitions=transitions, gpus=gpus)
    return state if commands else None


def _together(commands: Sequence[cmd.Command]) -> Iterator[tuple[cmd.Command, ...]]:
    """The commands, with those in one that are the same step of several GPUs: hundreds take a step at once."""
    for step, alike in groupby(commands, key=_step_of):
        same = tuple(alike)
        yield from ((each,) for each in same) if step is None else (same,)


def _step_of(command: cmd.Command) -> tuple[str, ...] | None:
    if not isinstance(command, cmd.AdvanceMove):
        return None
    return command.transition_id, command.from_state, command.to_state


def _change(state: ClusterState, together: tuple[cmd.Command, ...]) -> rules.Change | None:
    match together[0]:
        case cmd.PlanTransition() as command:
            return rules.plan(command.transition, state.gpus, job_version=state.version)
        case cmd.AdvanceMove() as command if command.to_state is not MoveState.ACQUIRING:
            records = [state.gpus[each.gpu] for each in together if isinstance(each, cmd.AdvanceMove)]
            steps = {"from_state": command.from_state, "to_state": command.to_state}
            # The term counts only where tokens are granted.
            return rules.advance_all(state.transitions[command.transition_id], records, term=0, **steps)
        case cmd.CommitPart() as command:
            return rules.commit(state.transitions[command.transition_id], state.gpus, command.role, command.layout)
        case _:
            return None


def described(record: GpuRecord) -> str:
    owner = f" of {record.owner}" if record.owner else ""
    return f"{record.gpu} {record.state}{owner}"


def may_be_told_of(state: ClusterState, gpu: GpuId) -> bool:
    """Whether somebody can say that the GPU is free: an instance on its node knows its holder, or asks its gate."""
    return bool(state.living(node=node_of(gpu)))


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
) -> Needs:
    """Plan the transition. `deadline_ms` counts from now; None allows as long as a start or a stop may take. `target`
    is None for a stop."""
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
    return Needs((command,), (f"plans {transition.id}: {reason}",))
