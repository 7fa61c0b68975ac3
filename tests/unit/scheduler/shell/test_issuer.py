"""The issuer publishes answers as events. A silent peer delays nothing, and a lost race changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.scheduler.decide.moving.steps import advance
from services.scheduler.shell.issuer import Issuer
from services.scheduler.shell.requests import Request
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from tests.component_bench import JOB, NODES, PATIENCE_S, Changes
from tests.unit.runtime.diary import no_gates
from tests.unit.scheduler.shell.command_header import HEADER
from tests.unit.scheduler.wire_cluster import WireCluster, wire_cluster
from tidegate.codec import encode_grants
from tidegate.ownership.adoption import adopt
from tidegate.ownership.records import GpuRecord, Move, MoveState, Owner, Part, PartKind, Transition
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.ports.store import Store
from tidegate.types import CommandId, GpuId, Grant, Layout, Role, Token, TransitionId
from tidegate.v1 import commands_pb2, events_pb2, instance_pb2

CLOSE = cmd.CloseIteration(HEADER, 1, last=False)
GRANT = Grant(GpuId("n0/0"), Token(1, 1))
ASK = cmd.AskGate(CommandId("ask-1"), NODES[0], GRANT, ("at-first", "at-second"), is_needed=True)


class Peers:
    """Peers that give the answers of a test, or raise them. A `silent` endpoint never answers."""

    def __init__(self, changes: Changes) -> None:
        self.answers: dict[str, commands_pb2.CommandResult | Exception] = {}
        self.gates: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.terms: list[int] = []
        self.silent: set[str] = set()
        self.ended: list[str] = []
        self._changes = changes

    async def send(self, endpoint: str, request: Request, timeout_s: float) -> commands_pb2.CommandResult:
        self.terms.append(request.header.term)
        self._note(endpoint)
        try:
            if endpoint in self.silent:
                await asyncio.Event().wait()
        finally:
            self.ended.append(endpoint)
        answer = self.answers.get(endpoint, commands_pb2.CommandResult(accepted=True))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask_gate(self, endpoint: str, timeout_s: float) -> instance_pb2.GateReportResponse:
        self._note(endpoint)
        if endpoint in self.gates:
            raise self.gates[endpoint]
        return instance_pb2.GateReportResponse(node=NODES[0], gpus=[events_pb2.GateState(gpu="n0/0", held=True)])

    def _note(self, endpoint: str) -> None:
        self.asked.append(endpoint)
        self._changes.notify()


class Issuing:
    def __init__(self, cluster: WireCluster, store: Store, peers: Peers, issuer: Issuer) -> None:
        self.cluster = cluster
        self.store = store
        self.peers = peers
        self.issuer = issuer
        self.state = ClusterState(job=JOB, incarnation=4)

    async def first_event(self) -> events_pb2.Event:
        """The first event, as it comes."""
        async with asyncio.timeout(PATIENCE_S), aclosing(self.cluster.bus.events.read(JOB, follow=True)) as events:
            async for _, event in events:
                return event
        raise AssertionError("the stream ended")

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.cluster.changes.until(holds)


@asynccontextmanager
async def issuing(tmp_path: Path) -> AsyncIterator[Issuing]:
    async with wire_cluster(tmp_path) as cluster:
        peers = Peers(cluster.changes)
        store = await cluster.client()
        issuer = Issuer(store, cluster.announcer("scheduler"), send=peers.send, ask_gate=peers.ask_gate)
        try:
            yield Issuing(cluster, store, peers, issuer)
        finally:
            await issuer.aclose()


async def test_a_leads_answer_becomes_an_event(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        await of.issuer.issue(CLOSE, of.state)
        event = await of.first_event()
        assert event.command_answered == events_pb2.CommandAnswered(command_id=HEADER.id, accepted=True)
        assert (event.incarnation, event.source) == (4, "scheduler")


async def test_a_command_has_the_term_under_which_it_was_issued(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        await of.issuer.issue(CLOSE, of.state)
        of.cluster.server.restart()
        await adopt(of.store, of.cluster.bus.term, no_gates)
        await of.issuer.issue(CLOSE, of.state)
        await of.until(lambda: of.peers.terms == [1, 2])


async def test_a_refusal_becomes_an_event_with_the_leads_words(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        of.peers.answers[HEADER.endpoint] = commands_pb2.CommandResult(message="it does not lead")
        await of.issuer.issue(CLOSE, of.state)
        want = events_pb2.CommandAnswered(command_id=HEADER.id, accepted=False, message="it does not lead")
        assert (await of.first_event()).command_answered == want


async def test_a_lead_without_an_answer_is_no_event_and_no_error(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        of.peers.answers[HEADER.endpoint] = PeerUnavailable("no answer within 10 s")
        await of.issuer.issue(CLOSE, of.state)
        await of.until(lambda: of.peers.asked == [HEADER.endpoint])
        await of.issuer.issue(ASK, of.state)
        assert (await of.first_event()).HasField("gate_reported"), "the silent lead led to no event"


async def test_a_silent_lead_holds_nobody_up_and_is_left_at_the_end(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        of.peers.silent.add(HEADER.endpoint)
        await of.issuer.issue(CLOSE, of.state)
        await of.issuer.issue(ASK, of.state)
        assert (await of.first_event()).HasField("gate_reported")
        assert of.peers.ended == []
        await of.issuer.aclose()
        assert of.peers.ended == [HEADER.endpoint]


async def test_a_gates_report_becomes_an_event_about_the_grant_that_was_asked_for(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        await of.issuer.issue(ASK, of.state)
        event = await of.first_event()
        assert event.gate_reported.node == NODES[0]
        assert [(gate.gpu, gate.held) for gate in event.gate_reported.gpus] == [("n0/0", True)]
        assert list(event.grants) == encode_grants([GRANT])
        assert of.peers.asked == ["at-first"]


async def test_an_instance_that_does_not_answer_for_its_gate_or_refuses_to_is_passed_over(tmp_path: Path) -> None:
    for failure in (
        PeerUnavailable("no answer within 10 s"),
        PeerRefused("AskGate: no folder", reason="no folder", status="INTERNAL", error="PermissionError"),
    ):
        async with issuing(tmp_path) as of:
            of.peers.gates["at-first"] = failure
            await of.issuer.issue(ASK, of.state)
            assert (await of.first_event()).HasField("gate_reported")
            assert of.peers.asked == ["at-first", "at-second"]


async def test_a_store_operation_is_done_when_issuing_returns(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        store = await of.cluster.client()
        await store.register((GRANT.gpu,))
        token = (await store.gpus())[GRANT.gpu].token
        await of.issuer.issue(cmd.MarkLost(CommandId("lost-1"), GRANT.gpu, token), of.state)
        assert (await store.gpus())[GRANT.gpu].state == "lost"
        await of.issuer.issue(cmd.Reclaim(CommandId("reclaim-1"), GRANT.gpu, token), of.state)
        assert (await store.gpus())[GRANT.gpu].state == "free"


async def test_a_store_operation_that_lost_a_race_changes_nothing_and_is_no_error(tmp_path: Path) -> None:
    async with issuing(tmp_path) as of:
        store = await of.cluster.client()
        await store.register((GRANT.gpu,))
        before = await store.gpus()
        stale = Token(9, 9)
        for void in (
            cmd.MarkLost(CommandId("lost-1"), GRANT.gpu, stale),
            cmd.Reclaim(CommandId("reclaim-1"), GRANT.gpu, stale),
            cmd.MarkLost(CommandId("lost-2"), GpuId("n7/0"), stale),
        ):
            await of.issuer.issue(void, of.state)
        assert await store.gpus() == before


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_same_step_of_several_gpus_is_refused_to_none_for_the_sake_of_another(
    tmp_path: Path, is_lost: bool
) -> None:
    gpus = (GpuId("n0/0"), GpuId("n0/1"), GpuId("n0/2"))
    async with issuing(tmp_path) as of:
        store = await of.cluster.client()
        await store.register(gpus)
        planned = await store.plan(_start_on(gpus, await store.gpus()))
        if is_lost:
            await store.mark_lost(gpus[1], planned.moves[1].token)
        state = replace(of.state, transitions={planned.id: planned})
        steps = [advance(planned, move, MoveState.ACQUIRING) for move in planned.moves]
        await of.issuer.issue_all([CLOSE, *steps], state)
        (after,) = await store.current_transitions(JOB)
        await of.until(lambda: of.peers.asked == [HEADER.endpoint])
        want = [MoveState.ACQUIRING, MoveState.PLANNED if is_lost else MoveState.ACQUIRING, MoveState.ACQUIRING]
        assert [move.state for move in after.moves] == want


async def test_a_plan_and_the_step_after_it_are_one_decision(tmp_path: Path) -> None:
    gpus = (GpuId("n0/0"), GpuId("n0/1"))
    async with issuing(tmp_path) as of:
        store = await of.cluster.client()
        await store.register(gpus)
        planned = _start_on(gpus, await store.gpus())
        steps = [advance(planned, move, MoveState.ACQUIRING) for move in planned.moves]
        await of.issuer.issue_all([cmd.PlanTransition(CommandId("t1/plan"), planned), *steps], of.state)
        (after,) = await store.current_transitions(JOB)
        assert {move.state for move in after.moves} == {MoveState.ACQUIRING}


def _start_on(gpus: tuple[GpuId, ...], records: Mapping[GpuId, GpuRecord]) -> Transition:
    return Transition(
        id=TransitionId("t1"),
        job=JOB,
        incarnation=4,
        moves=tuple(Move(gpu, None, Owner(JOB, Role.ACTOR), records[gpu].token) for gpu in gpus),
        parts=(Part(Role.ACTOR, PartKind.START, None, Layout(dp=len(gpus))),),
        planned_version=0,
        deadline_unix_ms=1 << 60,
        reason="the test asks",
    )
