"""Carries out the commands of a decision: store operations at once, calls to leads and gates in the background.

The scheduler publishes the answer of a lead or a gate as an event of its own. So every replica sees the answer, and a
recorded history contains it.

Invariants:
- A store operation that loses a race changes nothing and is not an error: the next decision starts from the new
  records of the store. [test_issuer: lost_a_race_changes_nothing]
- A command to a lead has the store's term at that time. [test_issuer: term_under_which_it_was_issued]
- A peer that does not answer delays nothing else. [test_issuer: silent_lead_holds_nobody_up]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import structlog

from services.scheduler.shell.requests import Request, encode_command
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from tidegate.ownership.records import StoreUnavailable
from tidegate.ownership.transitions import REFUSALS
from tidegate.ports.rpc import PeerRefused
from tidegate.ports.store import Store
from tidegate.runtime.announcer import Announcer
from tidegate.v1 import commands_pb2, events_pb2, instance_pb2

CALL_TIMEOUT_S = 10.0
"""Within the call a lead only takes the command. Its work comes after the call."""

_REFUSED = (*REFUSALS, KeyError)

SendCommand = Callable[[str, Request, float], Awaitable[commands_pb2.CommandResult]]
"""(endpoint, request, timeout in seconds) -> the lead's answer; ConnectionError when there is none."""
AskGate = Callable[[str, float], Awaitable[instance_pb2.GateReportResponse]]
"""(endpoint, timeout in seconds) -> the gate's report; ConnectionError or PeerRefused when there is none."""


class Issuer:
    def __init__(self, store: Store, announcer: Announcer, *, send: SendCommand, ask_gate: AskGate) -> None:
        self._store = store
        self._announcer = announcer
        self._send = send
        self._ask_gate = ask_gate
        self._under_way: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("issuer")

    async def issue_all(self, commands: Iterable[cmd.Command], state: ClusterState) -> None:
        """Begin the commands, in order. The same step of several GPUs is one operation of the store."""
        commands = tuple(commands)
        planned = {each.transition.id: each.transition for each in commands if isinstance(each, cmd.PlanTransition)}
        state = replace(state, transitions={**state.transitions, **planned})
        for _, group in groupby(commands, key=_step_of):
            alike = list(group)
            moves = [command for command in alike if isinstance(command, cmd.AdvanceMove)]
            if len(moves) < 2 or await self._is_refused_to_all(moves, state):
                for command in alike:
                    await self.issue(command, state)

    async def issue(self, command: cmd.Command, state: ClusterState) -> None:
        """Begin the command. A store operation is done when this returns."""
        match command:
            case _ if isinstance(command, cmd.LeadCommand):
                request = encode_command(command, config_json=state.config_json, term=self._store.term)
                self._begin(self._to_lead(command, request, state))
            case cmd.AskGate():
                self._begin(self._to_gate(command, state))
            case cmd.Await() | cmd.StopJob() | cmd.FinishJob():
                pass  # The written state has their effect.
            case _:
                await self._to_store(command, state)

    async def aclose(self) -> None:
        """Cancel the calls under way. The replica that goes on makes them again."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _to_lead(self, command: cmd.LeadCommand, request: Request, state: ClusterState) -> None:
        header = command.header
        try:
            result = await self._send(header.endpoint, request, CALL_TIMEOUT_S)
        except ConnectionError as error:
            # The command is issued again at its deadline, under the same id.
            self._log.warning("no answer from a lead", command=header.id, endpoint=header.endpoint, error=str(error))
            return
        if not result.accepted:
            self._log.warning("command refused", command=header.id, reason=result.message)
        answer = events_pb2.CommandAnswered(command_id=header.id, accepted=result.accepted, message=result.message)
        await self._announcer.publish(answer, incarnation=state.incarnation)

    async def _to_gate(self, command: cmd.AskGate, state: ClusterState) -> None:
        for endpoint in command.endpoints:
            try:
                report = await self._ask_gate(endpoint, CALL_TIMEOUT_S)
            except (ConnectionError, PeerRefused) as error:
                self._log.warning("no answer from a gate", node=command.node, endpoint=endpoint, error=str(error))
                continue
            reported = events_pb2.GateReported(node=report.node, gpus=report.gpus)
            await self._announcer.publish(reported, incarnation=state.incarnation, grants=[command.grant])
            return

    async def _to_store(self, command: cmd.StoreCommand, state: ClusterState) -> None:
        try:
            await self._store_operation(command, state)
        except _REFUSED as error:
            self._log.info("store operation void", command=cmd.command_id(command), reason=str(error))
        except StoreUnavailable as error:
            self._warn_of_silence(command, error)

    async def _is_refused_to_all(self, moves: Sequence[cmd.AdvanceMove], state: ClusterState) -> bool:
        """Take the step of these GPUs at once. What is refused to one of them is refused to all."""
        try:
            await self._advance(moves, state)
        except _REFUSED:
            return True
        except StoreUnavailable as error:
            self._warn_of_silence(moves[0], error)
        return False

    def _warn_of_silence(self, command: cmd.StoreCommand, error: StoreUnavailable) -> None:
        # The operation is issued again at its deadline, and the store takes every step once.
        self._log.warning("no answer from the store", command=cmd.command_id(command), error=str(error))

    async def _advance(self, moves: Sequence[cmd.AdvanceMove], state: ClusterState) -> None:
        first, *_ = moves
        await self._store.advance(
            state.transitions[first.transition_id],
            *(move.gpu for move in moves),
            from_state=first.from_state,
            to_state=first.to_state,
        )

    async def _store_operation(self, command: cmd.StoreCommand, state: ClusterState) -> None:
        match command:
            case cmd.PlanTransition():
                await self._store.plan(command.transition)
            case cmd.AdvanceMove():
                await self._advance([command], state)
            case cmd.CommitPart():
                await self._store.commit(state.transitions[command.transition_id], command.role, command.layout)
            case cmd.CloseTransition():
                await self._store.close(state.transitions[command.transition_id], command.outcome)
            case cmd.MarkLost():
                await self._store.mark_lost(command.gpu, command.token)
            case cmd.Reclaim():
                await self._store.reclaim(command.gpu, command.token)


def _step_of(command: cmd.Command) -> tuple[object, ...]:
    """Equal for the same step of several GPUs of one transition, and for no other commands."""
    if isinstance(command, cmd.AdvanceMove):
        return command.transition_id, command.from_state, command.to_state
    return (id(command),)
