"""Tidegate's gRPC server and client on real loopback sockets: deadlines, refusals, statuses, health, reflection."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import MAX_MESSAGE_BYTES, RpcServer, Service, serve
from tidegate.codec import WireError
from tidegate.ownership.records import StaleToken, StoreUnavailable, VersionConflict
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.channel import MAX_FRAME_BYTES
from tidegate.v1 import control_pb2, control_pb2_grpc

CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
PATIENCE_S = 10.0


class Servicer(control_pb2_grpc.ControlServicer):
    """Answers with the job's name, fails with `failure`, never answers "silent", streams three lines and then fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.called = asyncio.Event()
        self.ended = asyncio.Event()

    async def GetJob(self, request: control_pb2.GetJobRequest, context: Any) -> control_pb2.GetJobResponse:
        self.called.set()
        try:
            if request.job == "silent":
                await asyncio.Event().wait()
        finally:
            self.ended.set()
        if self.failure is not None:
            raise self.failure
        return control_pb2.GetJobResponse(job=request.job)

    async def ReadLogs(
        self, request: control_pb2.ReadLogsRequest, context: Any
    ) -> AsyncIterator[control_pb2.ReadLogsResponse]:
        try:
            for count in range(3):
                yield control_pb2.ReadLogsResponse(line=f"line {count}")
            if self.failure is not None:
                raise self.failure
            if request.follow:
                await asyncio.Event().wait()
        finally:
            self.ended.set()


def a_servicer(failure: Exception | None = None) -> Servicer:
    return Servicer(failure)  # type: ignore[abstract]  # the other calls stay the generated ones, unimplemented


@asynccontextmanager
async def serving(servicer: Servicer, address: str = "127.0.0.1:0") -> AsyncIterator[RpcServer]:
    service = Service(CONTROL, partial(control_pb2_grpc.add_ControlServicer_to_server, servicer))
    server = await serve([service], address)
    try:
        yield server
    finally:
        await server.stop(grace_s=0.0)


@asynccontextmanager
async def calling(
    endpoint: str, default_timeout_s: float = PATIENCE_S
) -> AsyncIterator[control_pb2_grpc.ControlAsyncStub]:
    channels = Channels(default_timeout_s=default_timeout_s)
    try:
        yield control_pb2_grpc.ControlStub(channels.connect(endpoint))
    finally:
        await channels.close()


async def test_port_zero_takes_a_free_port_and_answers_on_it() -> None:
    async with serving(a_servicer()) as server, calling(server.endpoint) as stub:
        assert server.endpoint == f"127.0.0.1:{server.port}"
        assert server.port > 0
        response = await stub.GetJob(control_pb2.GetJobRequest(job="one"))
        assert response.job == "one"


async def test_a_call_without_a_deadline_is_refused_before_its_handler_runs() -> None:
    servicer = a_servicer()
    async with serving(servicer) as server, grpc.aio.insecure_channel(server.endpoint) as bare:
        stub: control_pb2_grpc.ControlAsyncStub = control_pb2_grpc.ControlStub(bare)
        with pytest.raises(grpc.aio.AioRpcError) as single:
            await stub.GetJob(control_pb2.GetJobRequest(job="one"))
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await anext(aiter(stub.ReadLogs(control_pb2.ReadLogsRequest(job="one"))))
    assert not servicer.called.is_set()
    for refused in (single.value, streamed.value):
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "without a deadline; set one (timeout= in Python" in (refused.details() or "")


class Unforeseen(Exception):
    pass


FAILURES: dict[str, tuple[Exception, str, str]] = {
    "a bad argument": (ValueError("layout tp=0"), "INVALID_ARGUMENT", "layout tp=0"),
    "a bad message": (WireError("Grant.gpu is missing"), "INVALID_ARGUMENT", "Grant.gpu is missing"),
    "an old token": (StaleToken("n0/1: 1.3 is older than 1.4"), "FAILED_PRECONDITION", "n0/1: 1.3 is older"),
    "a lost race": (VersionConflict("version 4, not 3"), "ABORTED", "version 4, not 3"),
    "a bug": (Unforeseen("index 3"), "INTERNAL", "Unforeseen: index 3"),
}


@pytest.mark.parametrize("what", FAILURES)
async def test_a_handlers_exception_reaches_the_caller_as_a_status_with_its_message(what: str) -> None:
    failure, want_status, want_message = FAILURES[what]
    async with serving(a_servicer(failure)) as server, calling(server.endpoint) as stub:
        with pytest.raises(PeerRefused, match=want_message) as single:
            await stub.GetJob(control_pb2.GetJobRequest(job="one"))
        responses = aiter(stub.ReadLogs(control_pb2.ReadLogsRequest(job="one")))
        assert [(await anext(responses)).line for _ in range(3)] == ["line 0", "line 1", "line 2"]
        with pytest.raises(PeerRefused, match=want_message) as streamed:
            await anext(responses)
    for refused in (single.value, streamed.value):
        assert (refused.status, refused.error) == (want_status, type(failure).__name__)
        assert f"at {server.endpoint}: " in str(refused)


async def test_a_server_that_lacks_another_one_says_which() -> None:
    away = PeerUnavailable("/m at 10.0.0.8:1 gave no answer (UNAVAILABLE)", reason="nothing listens at 10.0.0.8:1")
    for failure, reason in ((StoreUnavailable("valkey is loading"), "valkey is loading"), (away, away.reason)):
        async with serving(a_servicer(failure)) as server, calling(server.endpoint) as stub:
            with pytest.raises(PeerUnavailable) as told:
                await stub.GetJob(control_pb2.GetJobRequest(job="one"))
        assert told.value.reason == reason


async def test_an_unserved_method_is_refused_as_unimplemented() -> None:
    async with serving(a_servicer()) as server, calling(server.endpoint) as stub:
        with pytest.raises(PeerRefused) as refused:
            await stub.CancelJob(control_pb2.CancelJobRequest(job="one"))
    assert refused.value.status == "UNIMPLEMENTED"


async def test_a_call_gets_the_default_deadline_when_it_has_none_of_its_own() -> None:
    async with serving(a_servicer()) as server, calling(server.endpoint, default_timeout_s=0.2) as stub:
        with pytest.raises(PeerUnavailable, match=r"GetJob at .* no answer within 0\.2 s \(DEADLINE_EXCEEDED"):
            await stub.GetJob(control_pb2.GetJobRequest(job="silent"))
        with pytest.raises(PeerUnavailable, match=r"no answer within 0\.1 s"):
            await stub.GetJob(control_pb2.GetJobRequest(job="silent"), timeout=0.1)


async def test_a_peer_that_is_gone_is_unavailable_and_is_found_again_at_its_old_port() -> None:
    async with serving(a_servicer()) as server, calling(server.endpoint) as stub:
        await stub.GetJob(control_pb2.GetJobRequest(job="one"))
        await server.stop(grace_s=0.0)
        reason = ""
        # Until gRPC has seen that the old connection is broken, a call goes there.
        while reason != f"nothing listens at {server.endpoint}":
            with pytest.raises(PeerUnavailable, match="UNAVAILABLE") as gone:
                await stub.GetJob(control_pb2.GetJobRequest(job="one"))
            reason = gone.value.reason
        async with serving(a_servicer(), server.endpoint):
            response = await stub.GetJob(control_pb2.GetJobRequest(job="two"), wait_for_ready=True)
        assert response.job == "two"


async def test_a_reader_that_leaves_ends_the_stream_at_the_server() -> None:
    servicer = a_servicer()
    async with serving(servicer) as server, calling(server.endpoint) as stub:
        responses = stub.ReadLogs(control_pb2.ReadLogsRequest(job="one", follow=True))
        assert (await anext(aiter(responses))).line == "line 0"
        responses.cancel()
        await asyncio.wait_for(servicer.ended.wait(), PATIENCE_S)


async def test_a_caller_that_is_cancelled_ends_the_call_at_the_server() -> None:
    servicer = a_servicer()
    async with serving(servicer) as server, calling(server.endpoint) as stub:

        async def call() -> None:
            await stub.GetJob(control_pb2.GetJobRequest(job="silent"))

        task = asyncio.create_task(call())
        await asyncio.wait_for(servicer.called.wait(), PATIENCE_S)
        task.cancel()
        await asyncio.wait_for(servicer.ended.wait(), PATIENCE_S)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_one_endpoint_has_one_channel() -> None:
    channels = Channels(default_timeout_s=1.0)
    assert channels.connect("127.0.0.1:1") is channels.connect("127.0.0.1:1")
    assert channels.connect("127.0.0.1:1") is not channels.connect("127.0.0.1:2")
    await channels.close()


def test_a_call_to_a_worker_on_another_node_carries_as_much_as_a_frame_on_this_one() -> None:
    tag_and_length_bytes = 16
    assert MAX_FRAME_BYTES + tag_and_length_bytes <= MAX_MESSAGE_BYTES


async def test_messages_far_beyond_grpcs_own_limit_pass_and_those_beyond_ours_are_refused() -> None:
    async with serving(a_servicer()) as server, calling(server.endpoint) as stub:
        large = "x" * (32 * 2**20)
        assert (await stub.GetJob(control_pb2.GetJobRequest(job=large))).job == large
        with pytest.raises(PeerRefused, match="larger than max"):
            await stub.GetJob(control_pb2.GetJobRequest(job="x" * MAX_MESSAGE_BYTES))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "example.org"])
async def test_a_listener_beyond_loopback_is_refused_unless_asked_for(host: str) -> None:
    with pytest.raises(ValueError, match=r"listens beyond this machine without TLS.*allow_insecure_remote"):
        await serve([], f"{host}:0")


async def test_a_listener_beyond_loopback_is_made_when_explicitly_allowed() -> None:
    server = await serve([], "0.0.0.0:0", allow_insecure_remote=True)
    assert server.port > 0
    await server.stop(grace_s=0.0)


@pytest.mark.parametrize("address", ["127.0.0.1", ":0", "127.0.0.1:http", "127.0.0.1:70000"])
async def test_a_bad_address_is_refused_with_the_form(address: str) -> None:
    with pytest.raises(ValueError, match="must be <host>:<port>"):
        await serve([], address)


async def test_a_taken_port_is_refused_and_not_shared() -> None:
    async with serving(a_servicer()) as server:
        with pytest.raises(ValueError, match=f"cannot listen on {server.endpoint}"):
            await serve([], server.endpoint)


async def test_health_answers_for_the_server_and_each_service() -> None:
    async with serving(a_servicer()) as server, grpc.aio.insecure_channel(server.endpoint) as bare:
        stub: Any = health_pb2_grpc.HealthStub(bare)

        async def status(service: str) -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        assert [await status(""), await status(CONTROL.full_name)] == ["SERVING", "SERVING"]


async def test_reflection_lets_buf_curl_call_without_the_schema() -> None:
    buf = Path(sys.executable).parent / "buf"
    async with serving(a_servicer()) as server:
        url = f"http://{server.endpoint}/{CONTROL.full_name}/GetJob"
        call = await asyncio.create_subprocess_exec(
            *(str(buf), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", "grpc-v1alpha"),
            *("--timeout", "10s", "--data", '{"job": "one"}', url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await asyncio.wait_for(call.communicate(), PATIENCE_S)
    assert call.returncode == 0, stderr.decode()
    assert json.loads(stdout) == {"job": "one"}
