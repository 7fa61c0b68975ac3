"""Adoption rebuilds ownership from the gates, takes a term above all others, and lets one of several adopters win."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.memory_store import MemoryServer, memory_store
from tidegate.gate import GateState
from tidegate.ownership.adoption import GateReports, adopt, adopted_by_another, next_term, rebuild
from tidegate.ownership.records import (
    GpuRecord,
    GpuState,
    Move,
    MoveState,
    Outcome,
    Owner,
    Part,
    PartKind,
    StoreNotAdopted,
    StoreUnavailable,
    Transition,
)
from tidegate.ports.store import StoreContents
from tidegate.types import GpuId, JobId, Layout, NodeId, Role, Token, TransitionId

JOB = JobId("job")
ACTOR = Owner(JOB, Role.ACTOR)
NODE, GPU = NodeId("node-a"), GpuId("node-a/0")
OLD, NEW = Token(1, 3), Token(1, 4)
OWNED = GpuRecord(GPU, GpuState.OWNED, ACTOR, OLD)
FREE = GpuRecord(GPU, GpuState.FREE, None, OLD)
LOST = GpuRecord(GPU, GpuState.LOST, ACTOR, OLD)
HELD_OLD, HELD_NEW = GateState(GPU, OLD, held=True), GateState(GPU, NEW, held=True)
UNHELD_OLD, UNHELD_NEW = GateState(GPU, OLD, held=False), GateState(GPU, NEW, held=False)

REBUILT = {
    "held under the record's token: stays owned": (OWNED, [HELD_OLD], OWNED),
    "its node cannot be reached: lost": (OWNED, None, LOST),
    "free on a node that cannot be reached: lost": (FREE, None, replace(FREE, state=GpuState.LOST)),
    "owned and nobody holds it: free": (OWNED, [UNHELD_OLD], FREE),
    "owned and no owner ever passed its gate: free": (OWNED, [], FREE),
    "lost and nobody holds it: free": (LOST, [UNHELD_OLD], FREE),
    "lost and still held: lost": (LOST, [HELD_OLD], LOST),
    "free but held: lost": (FREE, [HELD_OLD], replace(FREE, state=GpuState.LOST)),
    "held under a token that the store forgot: lost with an unknown owner": (
        OWNED,
        [HELD_NEW],
        GpuRecord(GPU, GpuState.LOST, None, NEW),
    ),
    "given back under a token that the store forgot: free": (OWNED, [UNHELD_NEW], replace(FREE, token=NEW)),
    "held by the former owner, the record's grant not yet used: lost": (
        replace(OWNED, token=NEW),
        [HELD_OLD],
        replace(LOST, token=NEW),
    ),
}


def start(*moves: Move) -> Transition:
    return Transition(
        id=TransitionId("start"),
        job=JOB,
        incarnation=1,
        moves=moves,
        parts=(Part(Role.ACTOR, PartKind.START, None, Layout()),),
        planned_version=0,
        deadline_unix_ms=0,
        reason="",
    )


ACQUIRING = start(Move(GPU, None, ACTOR, Token(1, 2), MoveState.ACQUIRING, OLD))


class TestRebuild:
    @pytest.mark.parametrize(("record", "seen", "want"), REBUILT.values(), ids=REBUILT)
    def test_a_gpu_is_rebuilt_from_its_record_and_its_gate(
        self, record: GpuRecord, seen: list[GateState] | None, want: GpuRecord
    ) -> None:
        reports = {} if seen is None else {NODE: seen}
        assert rebuild(StoreContents((record,), ()), reports).gpus == (want,)

    def test_a_gpu_without_a_record_is_taken_from_its_gate(self) -> None:
        never_passed = GateState(GpuId("node-a/1"), None, held=False)
        got = rebuild(StoreContents((), ()), {NODE: [HELD_NEW, never_passed]})
        assert got.gpus == (GpuRecord(GPU, GpuState.LOST, None, NEW),)

    def test_no_gpu_refers_to_a_closed_transition(self) -> None:
        """The first transition has no record, the second is closed by the adoption."""
        without_record = replace(OWNED, transition=TransitionId("unknown"))
        assert rebuild(StoreContents((without_record,), ()), {NODE: [HELD_OLD]}).gpus == (OWNED,)
        contents = StoreContents((replace(OWNED, transition=ACQUIRING.id),), (ACQUIRING,))
        got = rebuild(contents, {NODE: [UNHELD_NEW]})
        assert not got.transitions[0].is_open
        assert got.gpus[0].transition is None

    @pytest.mark.parametrize("seen", [[HELD_OLD], [], [GateState(GPU, Token(1, 2), held=False)]])
    def test_a_transition_that_no_gate_contradicts_stays_open(self, seen: list[GateState]) -> None:
        record = replace(OWNED, transition=ACQUIRING.id)
        want = StoreContents((record,), (ACQUIRING,))
        assert rebuild(want, {NODE: seen}) == want

    def test_a_transition_on_an_unreachable_node_stays_open_with_its_gpu_lost(self) -> None:
        record = replace(OWNED, transition=ACQUIRING.id)
        want = StoreContents((replace(record, state=GpuState.LOST),), (ACQUIRING,))
        assert rebuild(StoreContents((record,), (ACQUIRING,)), {}) == want

    def test_a_transition_that_a_gate_contradicts_is_aborted_and_holds_no_gpu(self) -> None:
        other = GpuId("node-a/1")
        planned = start(*ACQUIRING.moves, Move(other, None, ACTOR, OLD))
        records = (
            replace(OWNED, transition=planned.id),
            replace(FREE, gpu=other, transition=planned.id),
        )
        got = rebuild(StoreContents(records, (planned,)), {NODE: [UNHELD_NEW]})
        assert got.transitions[0].outcome is Outcome.ABORTED
        assert got.gpus == (replace(FREE, token=NEW), replace(FREE, gpu=other))

    def test_the_next_term_is_above_the_register_the_store_and_every_gate(self) -> None:
        contents = StoreContents((replace(FREE, token=Token(4, 1)),), ())
        assert next_term(2, {}, contents) == 5
        assert next_term(7, {}, contents) == 8
        assert next_term(2, {NODE: [GateState(GPU, Token(9, 1), held=False)]}, contents) == 10
        assert next_term(0, {}, StoreContents((), ())) == 1


class TestAdopt:
    async def test_a_new_store_opens_under_term_one(self) -> None:
        store = memory_store(MemoryServer())
        identity = await adopt(store, MemoryTermRegister(), no_gates)
        assert identity.is_open
        assert identity.term == 1
        await store.register((GPU,))
        assert (await store.gpus())[GPU].token == Token(1, 0)

    async def test_an_open_store_is_joined_under_its_term_and_no_gate_is_asked(self) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        await adopt(memory_store(server), terms, no_gates)

        async def must_not_ask() -> GateReports:
            raise AssertionError("the gates were asked for an open store")

        assert (await adopt(memory_store(server), terms, must_not_ask)).term == 1
        assert await terms.read() == (1, 1)

    async def test_an_open_store_below_the_least_term_is_shut_and_adopted_above_it(self) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        other, store = memory_store(server), memory_store(server)
        await adopt(other, terms, no_gates)
        await other.register((GPU,))

        async def ask() -> GateReports:
            return {NODE: [GateState(GPU, Token(6, 2), held=False)]}

        assert (await adopt(store, terms, ask, least_term=7)).term == 7
        assert (await store.gpus())[GPU] == GpuRecord(GPU, GpuState.FREE, None, Token(6, 2))
        with pytest.raises(StoreNotAdopted):
            await other.gpus()
        assert (await adopt(other, terms, no_gates, least_term=7)).term == 7, "it is joined, not adopted again"

    async def test_who_waits_for_another_adopter_changes_no_record_and_asks_no_gate(self) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        own, another = memory_store(server), memory_store(server)

        async def must_not_ask() -> GateReports:
            raise AssertionError("the gates were asked")

        with pytest.raises(StoreNotAdopted):
            await adopted_by_another(own, terms, must_not_ask)
        await adopt(another, terms, no_gates)
        await another.register((GPU,))
        assert (await adopted_by_another(own, terms, must_not_ask, least_term=1)).term == 1
        assert (await own.gpus())[GPU].state is GpuState.FREE
        with pytest.raises(StoreNotAdopted):
            await adopted_by_another(own, terms, must_not_ask, least_term=5)
        assert not server.identity.is_open, "a gate knows a term above it: it has to be adopted again"
        await adopt(another, terms, no_gates)
        assert (await adopted_by_another(own, terms, must_not_ask, least_term=5)).term == 5, "also without that gate"

    async def test_a_restarted_store_opens_with_the_reports_of_the_gates(self) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        store = memory_store(server)
        await adopt(store, terms, no_gates)
        other = GpuId("node-b/0")
        await store.register((GPU, other))
        server.restart()

        async def ask() -> GateReports:
            return {NODE: []}

        assert (await adopt(store, terms, ask)).term == 2
        assert {gpu: record.state for gpu, record in (await store.gpus()).items()} == {
            GPU: GpuState.FREE,
            other: GpuState.LOST,
        }

    @pytest.mark.parametrize("num_adopters", [2, 5])
    async def test_among_adopters_that_race_one_opens_the_store_and_the_others_join_it(self, num_adopters: int) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        stores = [memory_store(server) for _ in range(num_adopters)]
        all_asked = asyncio.Barrier(num_adopters)

        def first_together() -> Callable[[], Awaitable[GateReports]]:
            barriers = [all_asked]

            async def ask() -> GateReports:
                while barriers:
                    await barriers.pop().wait()
                return {}

            return ask

        identities = await asyncio.gather(*(adopt(store, terms, first_together()) for store in stores))
        assert set(identities) == {server.identity}
        assert server.identity.term == 1
        for store in stores:
            assert await store.gpus() == {}

    async def test_an_adopter_overtaken_between_its_term_and_its_write_joins_the_other(self) -> None:
        server = MemoryServer()
        slow, quick = memory_store(server), memory_store(server)

        class Overtaken(MemoryTermRegister):
            async def advance(self, *, expected_revision: int, term: int) -> int:
                revision = await super().advance(expected_revision=expected_revision, term=term)
                if term == 1:
                    await adopt(quick, self, no_gates)
                return revision

        terms = Overtaken()
        assert (await adopt(slow, terms, no_gates)).term == 2
        assert await terms.read() == (2, 2)

    async def test_an_adopter_that_died_after_its_term_leaves_the_store_to_the_next(self) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        await terms.advance(expected_revision=0, term=1)
        store = memory_store(server)
        with pytest.raises(StoreNotAdopted):
            await store.attach()
        assert (await adopt(store, terms, no_gates)).term == 2

    @pytest.mark.parametrize("is_store_lost", [False, True])
    @pytest.mark.parametrize("payload", [b"", b"garbage", b"-5", b"9" * 30, b"1"], ids=repr)
    async def test_a_register_without_a_term_or_with_a_smaller_one_stops_no_adoption_and_no_token_falls(
        self, payload: bytes, is_store_lost: bool
    ) -> None:
        server, terms = MemoryServer(), MemoryTermRegister()
        store = memory_store(server)
        await terms.advance(expected_revision=0, term=6)
        await adopt(store, terms, no_gates)
        await store.register((GPU,))
        terms.write_raw(payload)
        server.lose_data() if is_store_lost else server.restart()

        async def ask() -> GateReports:
            return {NODE: [GateState(GPU, Token(7, 2), held=False)]}

        with capture_logs() as lines:
            assert (await adopt(store, terms, ask)).term == 8
        assert await terms.read() == (8, 4)
        assert (await store.gpus())[GPU].token == Token(7, 2)
        want = [] if payload == b"1" else [("warning", "the term register held no term", 8)]
        assert [(line["log_level"], line["event"], line["replaced_by"]) for line in lines] == want

    async def test_a_term_that_the_bus_has_lost_is_taken_once_though_the_store_comes_back_empty_too(self) -> None:
        server = MemoryServer()
        assert (await adopt(memory_store(server), MemoryTermRegister(), no_gates)).term == 1
        terms = MemoryTermRegister()

        assert (await adopt(memory_store(server), terms, no_gates)).term == 1, "the store is open"
        assert (await terms.read())[0] == 1
        assert (await adopt(memory_store(MemoryServer()), terms, no_gates)).term == 2

    async def test_an_error_while_the_gates_are_asked_leaves_the_store_closed(self) -> None:
        server = MemoryServer()

        async def broken() -> GateReports:
            raise StoreUnavailable("not now")

        with pytest.raises(StoreUnavailable):
            await adopt(memory_store(server), MemoryTermRegister(), broken)
        assert not server.identity.is_open


async def no_gates() -> GateReports:
    return {}
