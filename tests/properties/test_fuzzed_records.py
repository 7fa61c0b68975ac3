"""Whatever bytes lie in the store's cells, a gate's folder or a channel: a value, or the reader's own error."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from tests.properties.fuzzing import (
    ODD_VALUES,
    TEXTS,
    WORDS,
    damaged_bytes,
    damaged_json,
    fuzzed,
    messages,
    value_or_refusal,
)
from tidegate.adapters import tables
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cell, Reading
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.adapters.nats_consumer import dead_letter_of
from tidegate.adapters.subjects import parse_sample_subject, term_of, term_payload
from tidegate.gate import Gate, GateClosed, GateDamaged
from tidegate.json_text import parse_json, typed, whole_number
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import (
    GateState,
    GpuRecord,
    GpuState,
    Move,
    Owner,
    Part,
    PartKind,
    StaleToken,
    StoreDamaged,
    StoreNotAdopted,
    Transition,
    decode_gpu,
    decode_transition,
    encode_gpu,
    encode_transition,
    transition_number,
)
from tidegate.ports.store import JobState, LeadRecord
from tidegate.runtime.channel import BlockingChannel, ChannelClosed, frame
from tidegate.runtime.launch import WorkerSpec
from tidegate.types import (
    LARGEST_TERM,
    GpuId,
    Grant,
    InstanceId,
    JobId,
    Layout,
    NodeId,
    Role,
    SampleId,
    Token,
    TransitionId,
)
from tidegate.v1 import workers_pb2 as wire

JOB = JobId("tide")
GPU = GpuId("n0/0")
OWNER = Owner(JOB, Role.ACTOR)
TOKEN = Token(1, 7)
OWNED = GpuRecord(GPU, GpuState.OWNED, OWNER, TOKEN, TransitionId("tide/1/t4"))
TRANSITION = Transition(
    id=TransitionId("tide/1/t4"),
    job=JOB,
    incarnation=1,
    moves=(Move(GPU, None, OWNER, TOKEN), Move(GpuId("n0/1"), OWNER, None, TOKEN, granted_token=Token(1, 8))),
    parts=(Part(Role.ACTOR, PartKind.RESIZE, Layout(dp=2), Layout(tp=2)),),
    planned_version=3,
    deadline_unix_ms=1000,
    reason="a test",
)
LEAD = LeadRecord(JOB, Role.ACTOR, InstanceId("actor@n0"), "127.0.0.1:1", 3, 99)
SPEC = WorkerSpec(entry="tidegate.x:main", grant=Grant(GPU, TOKEN), log_path=Path("/tmp/x"), env={"A": "b"})
"""Nothing starts it."""

RECORDS = [json.loads(encode_gpu(OWNED)), json.loads(encode_gpu(GpuRecord(GPU, GpuState.FREE, None, TOKEN)))]


@fuzzed
@given(damaged_json(RECORDS))
@example(b'{"gpu":"n0/0","state":"free","owner":null,"token":{"term":Infinity,"counter":1},"transition":null}')
def test_a_gpu_record_of_any_bytes_is_read_or_refused(encoded: bytes) -> None:
    record = value_or_refusal(decode_gpu, encoded, ValueError)
    if record is not None:
        assert decode_gpu(encode_gpu(record)) == record
        assert Token(0, 0) <= record.token <= Token(LARGEST_TERM, LARGEST_TERM)


@fuzzed
@given(damaged_json([json.loads(encode_transition(TRANSITION))]))
def test_a_transition_of_any_bytes_is_read_or_refused(encoded: bytes) -> None:
    transition = value_or_refusal(decode_transition, encoded, ValueError)
    if transition is not None:
        assert decode_transition(encode_transition(transition)) == transition
        assert transition_number(transition.id) >= 0


@fuzzed
@given(damaged_json([json.loads(tables.encode_lead(LEAD))]))
def test_a_leads_record_of_any_bytes_is_read_or_refused(encoded: bytes) -> None:
    cell = tables.lead_cell(JOB, Role.ACTOR)

    def read(found: bytes) -> LeadRecord | None:
        return tables.read_lead(Reading(0, {}, {cell: found}), cell)

    lead = value_or_refusal(read, encoded, StoreDamaged)
    assert lead is None or read(tables.encode_lead(lead)) == lead


@fuzzed
@given(damaged_bytes([tables.encode_job_state(JobState(b"{}\n1 2", 3, 4))]) | st.binary(max_size=20))
def test_a_written_state_of_any_bytes_is_read_or_refused(encoded: bytes) -> None:
    def read(found: bytes) -> JobState | None:
        return tables.read_job_state(Reading(0, {}, {tables.state_cell(JOB): found}), JOB)

    state = value_or_refusal(read, encoded, StoreDamaged)
    assert state is None or read(tables.encode_job_state(state)) == state


@fuzzed
@given(
    st.dictionaries(
        st.sampled_from([f"leases:{JOB}", f"boots:{JOB}"]), damaged_bytes([b"17", b"1764100000000"]), max_size=2
    )
)
def test_counts_of_any_bytes_are_read_or_refused_and_stay(found: dict[str, bytes]) -> None:
    async def use(server: MemoryServer) -> None:
        store = CellStore(MemoryCells(server))
        await store.adopt(expected=await store.identity(), term=1, rebuilt=await store.contents())
        await store.attach()
        name = InstanceId("actor@n0")
        for table, value in found.items():
            server.write({Cell(table, name): value})
        for calls in (
            lambda: store.expired(JOB, longest_ms=5),
            lambda: store.next_boot(JOB, name),
            lambda: store.renew(JOB, name, ttl_ms=5),
        ):
            before = {table: server.read_cell(Cell(table, name)) for table in found}
            with suppress(StoreDamaged):
                await calls()
                continue
            assert {table: server.read_cell(Cell(table, name)) for table in found} == before

    asyncio.run(use(MemoryServer()))


@fuzzed
@given(adopted=damaged_bytes([b"5f3c" * 10]), term=damaged_bytes([b"17", b"999999999999"]))
@example(adopted=b"5f3c", term=b"9" * 30)
@example(adopted=b"\xff", term=b"1")
def test_an_adoption_of_any_bytes_is_read_or_refused_and_stays(adopted: bytes, term: bytes) -> None:
    async def use(server: MemoryServer) -> None:
        store = CellStore(MemoryCells(server))
        await store.adopt(expected=await store.identity(), term=1, rebuilt=await store.contents())
        await store.attach()
        server.write({tables.RUN_ID: adopted, tables.TERM: term})
        for call in (store.identity, store.attach, store.gpus, lambda: store.next_boot(JOB, InstanceId("actor@n0"))):
            with suppress(StoreDamaged, StoreNotAdopted):
                await call()
        with suppress(StoreDamaged):
            found = await store.identity()
            assert 0 <= found.term <= LARGEST_TERM
            assert (found.adopted_run_id or "", str(found.term)) == (adopted.decode(), term.decode())
        assert (server.read_cell(tables.RUN_ID), server.read_cell(tables.TERM)) == (adopted, term)

    asyncio.run(use(MemoryServer()))


@fuzzed
@given(damaged_bytes([b"17", b"999999999"]) | st.binary(max_size=12))
@example(b"")
@example(b"9" * 5000)
def test_a_term_registers_bytes_are_a_term_or_none(payload: bytes) -> None:
    term = term_of(payload)
    assert term is None or (term_payload(term) == payload and 0 <= term < LARGEST_TERM)


@fuzzed
@given(st.binary(max_size=12) | damaged_bytes([b"3"]))
@example(b"")
def test_whatever_the_term_register_holds_an_adoption_takes_a_term_above_the_gates(payload: bytes) -> None:
    async def use(server: MemoryServer) -> None:
        terms = MemoryTermRegister()
        terms.write_raw(payload)

        async def ask() -> GateReports:
            return {NodeId("n0"): [GateState(GPU, Token(7, 2), held=True)]}

        opened = await adopt(CellStore(MemoryCells(server)), terms, ask)
        assert opened.term == max(term_of(payload) or 0, 7) + 1

    asyncio.run(use(MemoryServer()))


@fuzzed
@given(record=damaged_json([{"term": 1, "counter": 7, "pid": 1}]))
@example(record=b'{"term": 1.9, "counter": 7, "pid": 1}')
@example(record=b'{"term": Infinity, "counter": 7, "pid": 1}')
@example(record=b'{"term": -1, "counter": 7, "pid": 1}')
@example(record=b'{"term": 18446744073709551616, "counter": 7, "pid": 1}')
@example(record=b"[" * 100_000)
def test_no_smaller_token_passes_a_gate_whatever_its_record_holds(tmp_path: Path, record: bytes) -> None:
    gate = Gate(tmp_path)
    (tmp_path / "n0%2F0.json").write_bytes(record)
    highest = value_or_refusal(gate.highest_token, GPU, GateDamaged)
    assert highest is None or Token(0, 0) <= highest <= Token(LARGEST_TERM, LARGEST_TERM)
    assert gate.passed() == ([] if highest is None else [Grant(GPU, highest)])
    with pytest.raises((StaleToken, GateDamaged, GateClosed)):
        gate.acquire(Grant(GPU, Token(0, 0)))
    assert (tmp_path / "n0%2F0.json").read_bytes() == record


@fuzzed
@given(damaged_json([json.loads(SPEC.to_json())]))
def test_a_workers_specification_of_any_bytes_is_read_or_refused(text: bytes) -> None:
    spec = value_or_refusal(WorkerSpec.parse, text, ValueError)
    assert spec is None or WorkerSpec.parse(spec.to_json()) == spec


@fuzzed
@given(st.dictionaries(st.sampled_from(["Tg-Subject", "Tg-Reason", "Tg-Stream"]), st.sampled_from(['"x"', "[", ""])))
def test_a_dead_letter_with_any_headers_is_listed(headers: dict[str, str]) -> None:
    message = Msg(_client=None, subject="tg.dead.tide", data=b"?", headers={**headers, "Nats-Sequence": "7"})  # type: ignore[arg-type]  # nothing is sent
    letter = dead_letter_of(JOB, message)
    assert (letter.id, letter.size_bytes) == (7, 1)
    assert letter.reason


frames = messages(wire.WorkerCall).map(frame)


@fuzzed
@given(st.lists(frames, min_size=1, max_size=2).map(b"".join).flatmap(lambda data: damaged_bytes([data])))
def test_a_channel_of_any_bytes_gives_whole_messages_or_is_closed(data: bytes) -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        channel = BlockingChannel(receiver, wire.WorkerCall)
        sender.sendall(data)
        sender.close()
        with pytest.raises(ChannelClosed):
            all(iter(lambda: channel.receive(0), None))


@fuzzed
@given(
    st.sampled_from(WORDS) | TEXTS | st.from_regex(r"(tg\.samples\.tide\.scored|1)(\.[0-9]{0,30}){3}", fullmatch=True)
)
@example("\u0661.2.3.4")
@example("tg.samples.tide.scored.1.2.\u0661")
@example("tide/1/t" + "9" * 5000)
def test_any_text_is_the_one_name_of_its_thing_or_is_none(text: str) -> None:
    place = parse_sample_subject(text)
    if place is not None:
        stage, incarnation, iteration, prompt = place
        assert text.endswith(f".{stage}.{incarnation}.{iteration}.{prompt}")
    assert transition_number(TransitionId(text)) >= 0
    sample = value_or_refusal(SampleId.parse, text, ValueError)
    assert sample is None or str(sample) == text


@fuzzed
@given(damaged_json([{"a": [1, {"b": 2.5}]}]))
def test_any_text_reads_as_a_value_or_is_refused(text: bytes) -> None:
    value_or_refusal(parse_json, text, ValueError)


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
def test_a_number_is_whole_and_not_below_0_or_is_refused(value: Any) -> None:
    number = value_or_refusal(lambda given: whole_number(given, "it"), value, ValueError)
    assert (number is None) == (type(value) is not int or value < 0)
    assert value_or_refusal(lambda given: typed(str, given, "it"), value, ValueError) in (value, None)
