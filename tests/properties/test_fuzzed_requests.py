"""Whatever fields a request over gRPC has: it is carried out, or refused with its status and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.evolve.fold import evolve
from services.scheduler.shell.codecs.state_codec import event_of
from services.scheduler.shell.peers import Peers
from services.scheduler.state.cluster_state import Phase
from services.scheduler.state.invariants import check
from tests import effort
from tests.component_bench import JOB
from tests.integration.runtime.nodes import JOB as NODE_JOB
from tests.integration.runtime.nodes import Node, grant, services_of
from tests.properties import real_messages as real
from tests.properties.fuzzing import WORDS, fuzzed, messages, value_or_refusal
from tests.unit.runtime.served_component import Served, served
from tests.unit.scheduler.shell.controlled import Controlled, controlled
from tidegate.adapters.grpc_server import serve
from tidegate.certs.identity import Identity
from tidegate.certs.job_credentials import job_identity
from tidegate.codec import MAX_SAMPLES, check_parts
from tidegate.ports.rpc import PeerRefused
from tidegate.runtime.launch import LaunchRefused, WorkerFds, WorkerProcess, WorkerSpec
from tidegate.runtime.snapshots import ShardSource
from tidegate.v1 import commands_pb2, control_pb2, events_pb2, instance_pb2, instance_pb2_grpc, types_pb2

rarely_fuzzed = settings(fuzzed, max_examples=2000 if effort.IS_FULL else 50)
"""A call takes milliseconds."""
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"}
"""The statuses of requests that are wrong. INTERNAL and UNKNOWN would be faults of the servicer."""
GPUS = ("n0/0", "n0/1", "n0/2", "n0/3", "n1/0", "n1/1", "n1/2", "n1/3")
TIMEOUT_S = 20.0


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def requests_of(module: Any, service: str, *, but: Sequence[str] = ()) -> dict[str, type[Message]]:
    """The request of each method of a service."""
    methods = module.DESCRIPTOR.services_by_name[service].methods
    return {each.name: getattr(module, each.input_type.name) for each in methods if each.name not in but}


# Their handlers wait for what may never come.
CONTROL = requests_of(control_pb2, "Control", but=("ListEvents", "ReadLogs"))
COMPONENT = requests_of(commands_pb2, "Component")


async def status_of(call: Awaitable[object]) -> str:
    """The name of the gRPC status with which a call ended. A refusal says why."""
    try:
        await call
    except PeerRefused as refused:
        status, said = refused.status, refused.reason
    except grpc.aio.AioRpcError as error:
        status, said = error.code().name, error.details() or ""
    else:
        return "OK"
    assert said, f"{status} says nothing"
    return status


@st.composite
def control_requests(draw: st.DrawFn) -> tuple[str, Any]:
    method = draw(st.sampled_from(sorted(CONTROL)))
    request: Any = draw(messages(CONTROL[method], words=(*WORDS, *GPUS), whole=draw(st.booleans())))
    if "job" in request.DESCRIPTOR.fields_by_name and draw(st.integers(0, 9)):
        request.job = JOB
    if method == "GetJob":
        request.ClearField("wait_s")
    return method, request


@pytest.fixture
def control(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Controlled]:
    stack = AsyncExitStack()
    running = [state for state in real.lived_job().states if state.phase is Phase.RUNNING]

    async def opened() -> Controlled:
        of = await stack.enter_async_context(controlled(tmp_path))
        of.state = running[len(running) // 2]
        return of

    yield runner.run(opened())
    runner.run(stack.aclose())


@rarely_fuzzed
@given(control_requests())
@example(("DrainGpus", control_pb2.DrainGpusRequest(job=JOB)))
def test_a_control_request_of_any_fields_is_answered_or_refused(
    runner: asyncio.Runner, control: Controlled, asked: tuple[str, Any]
) -> None:
    method, request = asked
    state = control.state
    assert state is not None

    async def call() -> None:
        before = [event async for _, event in control.cluster.bus.events.read(JOB)]
        assert await status_of(getattr(control.stub, method)(request, timeout=TIMEOUT_S)) in {"OK", *REFUSALS}
        after = [event async for _, event in control.cluster.bus.events.read(JOB)]
        assert after[: len(before)] == before
        for event in after[len(before) :]:
            folded = evolve(state, replace(event_of(event), stream_sequence=state.applied_seq + 1))
            assert not check(state, folded)

    runner.run(call())


@pytest.fixture
def component(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Served]:
    stack = AsyncExitStack()
    yield runner.run(stack.enter_async_context(served(tmp_path)))
    runner.run(stack.aclose())


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, Any]:
    method = draw(st.sampled_from(sorted(COMPONENT)))
    request: Any = draw(messages(COMPONENT[method], words=(*WORDS, *GPUS), whole=draw(st.booleans())))
    return method, request


@rarely_fuzzed
@given(commands())
def test_a_command_of_any_fields_is_taken_whole_or_refused_and_not_stored(
    runner: asyncio.Runner, component: Served, asked: tuple[str, Any]
) -> None:
    method, request = asked
    bench, store = component.hosted.bench, component.hosted.store
    header = bench.header(incarnation=1)
    request.header.job, request.header.lead_epoch, request.header.incarnation = JOB, header.lead_epoch, 1
    request.header.term = header.term
    request.header.id = f"{header.id}/{request.header.id[:8]}".replace("\0", "")
    # What a lead does with a command is not asked here: it would dial the addresses.
    request.header.ClearField("instances")

    async def call() -> None:
        status = await status_of(getattr(component.stub, method)(request, timeout=TIMEOUT_S))
        assert status in {"OK", "INVALID_ARGUMENT"}
        stored = await store.recall(JOB, request.header.id)
        if status != "OK":
            assert stored is None
        if stored is not None:
            check_parts(request)

    runner.run(call())


def test_a_plan_of_more_samples_than_an_iteration_can_have_is_refused(
    runner: asyncio.Runner, component: Served
) -> None:
    header = component.hosted.bench.header(incarnation=1)
    plan = types_pb2.IterationPlan(num_prompts=2**31, group_size=2**31, num_minibatches=1)
    request = commands_pb2.OpenIterationRequest(header=header, plan=plan)

    async def call() -> None:
        await component.stub.OpenIteration(request)

    with pytest.raises(PeerRefused, match=f"at most {MAX_SAMPLES:,}"):
        runner.run(call())


class RefusingLauncher:
    """Starts no worker."""

    async def launch(self, spec: WorkerSpec, fds: WorkerFds) -> WorkerProcess:
        raise LaunchRefused(f"no worker is started on {spec.grant.gpu}")

    async def close(self) -> None:
        pass


class NoShards(ShardSource):
    """No other node answers."""

    async def read(self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, *, timeout_s: float) -> Any:
        raise ConnectionError(f"{shard.endpoint[:20]} does not answer")
        yield b""


INSTANCE = requests_of(instance_pb2, "Instance") | requests_of(instance_pb2, "Weights")
UNARY_STREAM = ("Call", "FetchShard")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node("n0", tmp_path / "own", RefusingLauncher(), source=NoShards())
    made.gate.acquire(grant("n0/1", counter=5)).close()
    return made


@pytest.fixture
def stubs(runner: asyncio.Runner, node: Node) -> Iterator[dict[str, Any]]:
    stack = AsyncExitStack()

    async def opened() -> dict[str, Any]:
        server = await serve(services_of(node), "127.0.0.1:0")
        stack.push_async_callback(lambda: server.stop(grace_s=0))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.endpoint))
        instance, weights = instance_pb2_grpc.InstanceStub(channel), instance_pb2_grpc.WeightsStub(channel)
        return {name: getattr(instance, name, None) or getattr(weights, name) for name in INSTANCE}

    yield runner.run(opened())
    runner.run(stack.aclose())


@st.composite
def instance_requests(draw: st.DrawFn) -> tuple[str, Any]:
    method = draw(st.sampled_from(sorted(INSTANCE)))
    request: Any = draw(messages(INSTANCE[method], words=(*WORDS, *GPUS, "demo"), whole=draw(st.booleans())))
    if "job" in request.DESCRIPTOR.fields_by_name and draw(st.integers(0, 9)):
        request.job = NODE_JOB
    return method, request


@rarely_fuzzed
@given(asked=instance_requests())
@example(asked=("DropSnapshots", instance_pb2.DropSnapshotsRequest(job=NODE_JOB, before_version=2**32 - 1)))
def test_a_request_to_an_instance_of_any_fields_is_answered_or_refused(
    runner: asyncio.Runner, node: Node, stubs: dict[str, Any], tmp_path: Path, asked: tuple[str, Any]
) -> None:
    method, request = asked

    async def call() -> None:
        answer = stubs[method](request, timeout=TIMEOUT_S)
        _ = [each async for each in answer] if method in UNARY_STREAM else await answer

    before = node.gate.report()
    status = runner.run(status_of(call()))
    # UNAVAILABLE: another node, which a snapshot names, does not answer.
    assert status in {"OK", "UNAVAILABLE", *REFUSALS}, (status, method, request)
    assert node.workers.running() == ()
    if status == "INVALID_ARGUMENT":
        assert node.gate.report() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"], "nothing is written beside its folder"


class AnsweredCall:
    """A channel whose calls all get one answer."""

    def __init__(self, answer: Message) -> None:
        self._answer = answer

    def connect(self, endpoint: str, peer: Identity) -> AnsweredCall:
        return self

    def unary_unary(self, *_: Any, **__: Any) -> Callable[..., Awaitable[Message]]:
        async def call(*_: Any, **__: Any) -> Message:
            return self._answer

        return call

    unary_stream = unary_unary


@rarely_fuzzed
@given(messages(instance_pb2.GateReportResponse, words=(*WORDS, *GPUS), whole=True))
def test_a_report_of_a_gate_of_any_fields_is_taken_or_counts_as_none(report: instance_pb2.GateReportResponse) -> None:
    """The scheduler publishes it as an event, which it must be able to read."""
    peers = Peers(AnsweredCall(report), job_identity(JOB))  # type: ignore[arg-type]  # only `connect` is used
    taken = value_or_refusal(lambda _: asyncio.run(peers.ask_gate("at-n0", 1.0)), None, PeerRefused)
    if taken is None:
        return
    published = events_pb2.GateReported(node=taken.node, gpus=taken.gpus)
    payload = real.said(published, source="scheduler", role=None)
    assert event_of(events_pb2.Event.FromString(payload))
