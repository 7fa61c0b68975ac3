"""The requests of a lead to an instance, sent to one in this process and to one behind gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from tests.integration.runtime.nodes import JOB, Node, fork_server, grant, services_of
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import serve
from tidegate.codec import encode_grants
from tidegate.gate import GateClosed, GateState, StaleToken
from tidegate.ownership.records import UnknownGpu
from tidegate.runtime.crew import InstancePort, WorkerGone, WorkerRefused
from tidegate.runtime.fork_client import ForkServerLauncher
from tidegate.runtime.instance import LocalInstance
from tidegate.runtime.launch import until_readable
from tidegate.runtime.remote_instance import GrpcShardSource, RemoteInstance
from tidegate.types import NO_TOKEN, Grant, Token
from tidegate.v1 import instance_pb2, instance_pb2_grpc
from tidegate.v1 import workers_pb2 as wire

Port = LocalInstance | RemoteInstance


@pytest.fixture(scope="module")
def fork_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("node")
    with fork_server(folder / "fork.sock"):
        yield folder / "fork.sock"


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels(default_timeout_s=60)
    yield channels
    await channels.close()


@pytest.fixture
async def node(fork_socket: Path, tmp_path: Path, channels: Channels) -> AsyncIterator[Node]:
    launcher = await ForkServerLauncher.connect(fork_socket, timeout_s=20)
    node = Node("n0", tmp_path, launcher, source=GrpcShardSource(channels.connect))
    yield node
    await node.workers.aclose()
    await launcher.close()


@pytest.fixture(params=["local", "remote"])
async def port(request: pytest.FixtureRequest, node: Node, channels: Channels) -> AsyncIterator[Port]:
    if request.param == "local":
        yield node.instance
        return
    server = await serve(services_of(node), "127.0.0.1:0")
    yield RemoteInstance(channels.connect(server.endpoint), timeout_s=60)
    await server.stop(grace_s=0)


async def replies(port: InstancePort, held: Grant, call: wire.WorkerCall) -> list[wire.WorkerReply]:
    return [reply async for reply in port.call(held, call, timeout_s=60)]


def about(what: str) -> wire.WorkerCall:
    return wire.WorkerCall(start_engine=wire.StartEngine(config_json=what))


async def test_workers_start_through_the_gate_and_free_it_when_stopped(port: Port, node: Node) -> None:
    both = [grant("n0/0"), grant("n0/1")]
    await port.start_workers(JOB, "t1", both)
    assert await port.workers(JOB) == tuple(both)
    assert node.gate.report() == [GateState(held.gpu, Token(1, 1), held=True) for held in both]
    assert await port.stop_workers(JOB, "t2", both) == 0
    assert await port.workers(JOB) == ()
    assert [state.held for state in node.gate.report()] == [False, False]
    assert node.deaths.empty()


async def test_a_repeated_start_and_a_repeated_stop_change_nothing(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    (first,) = await replies(port, grant(), about("random"))
    await port.start_workers(JOB, "t1", [grant()])
    assert await port.workers(JOB) == (grant(),)
    assert first.started.detail
    await port.stop_workers(JOB, "t2", [grant()])
    await port.start_workers(JOB, "t3", [grant(counter=2)])
    await port.stop_workers(JOB, "t2", [grant()])
    assert await port.workers(JOB) == (grant(counter=2),)


async def test_a_stop_ends_a_worker_of_an_earlier_token_of_its_gpu(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    await port.stop_workers(JOB, "t2", [grant(counter=2)])
    assert await port.workers(JOB) == ()
    assert [state.held for state in node.gate.report()] == [False]
    assert node.deaths.empty()


STANDING_BY = Grant(grant().gpu, NO_TOKEN)


async def test_a_worker_that_stands_by_takes_a_gpu_and_gives_it_back_as_the_same_process(
    port: Port, node: Node
) -> None:
    await port.start_workers(JOB, "t1", [STANDING_BY])
    assert (await port.workers(JOB), node.gate.report()) == ((STANDING_BY,), [])
    (first,) = await replies(port, STANDING_BY, about("pid"))
    for counter in (1, 2):
        held = grant(counter=counter)
        await port.start_workers(JOB, f"t{counter}", [held])
        assert (await port.workers(JOB), node.gate.is_held(held.gpu)) == ((held,), True)
        with pytest.raises(WorkerGone, match=rf"runs under 1\.{counter}"):
            await replies(port, STANDING_BY, about("pid"))
        (reply,) = await replies(port, held, about("pid"))
        assert reply.started.detail == first.started.detail
        await port.stand_down(JOB, [held])
        assert (await port.workers(JOB), node.gate.is_held(held.gpu)) == ((STANDING_BY,), False)
    await port.stop_workers(JOB, "t3", [STANDING_BY])
    assert (await port.workers(JOB), node.deaths.empty()) == ((), True)


async def test_a_start_that_is_cancelled_gives_the_gpus_back_that_it_took(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.workers.start([STANDING_BY])
    took = asyncio.get_running_loop().create_future()
    acquire = node.gate.acquire

    def noted(held: Grant) -> object:
        if not took.done():
            took.set_result(held)
        return acquire(held)

    monkeypatch.setattr(node.gate, "acquire", noted)
    # The process for n0/1 is still to be forked when n0/0 has a worker.
    start = asyncio.create_task(node.workers.start([grant(), grant("n0/1")]))
    assert await took == grant()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not node.gate.is_held(grant().gpu)
    assert await node.instance.workers(JOB) == (STANDING_BY,)


async def test_a_worker_that_stands_by_owns_no_time_of_the_slot(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [STANDING_BY])
    await replies(port, STANDING_BY, about("pid"))
    assert not node.timeline.exists() or node.timeline.read_text() == ""
    before_ns = time.monotonic_ns()
    await port.start_workers(JOB, "t2", [grant()])
    await replies(port, grant(), about("pid"))
    await port.stand_down(JOB, [grant()])
    after_ns = time.monotonic_ns()
    await replies(port, STANDING_BY, about("pid"))
    lines = [json.loads(line) for line in node.timeline.read_text().splitlines()]
    spans = [line for line in lines if "state" in line]
    assert spans
    assert all(before_ns <= span["start_ns"] < span["end_ns"] <= after_ns for span in spans)


async def test_a_worker_that_was_started_with_a_gpu_may_stand_by(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    await port.stand_down(JOB, [grant()])
    elsewhere = node.gate.acquire(grant(counter=2))
    with pytest.raises(GateClosed, match=r"held by token 1\.2"):
        await port.start_workers(JOB, "t2", [grant(counter=3)])
    assert await port.workers(JOB) == (STANDING_BY,)
    elsewhere.close()


async def test_no_standby_starts_beside_a_worker_that_has_the_gpu(node: Node) -> None:
    await node.workers.start([grant()])
    with pytest.raises(GateClosed, match=r"n0/0 has a worker under 1\.1, which hangs or still ends"):
        await node.workers.start([STANDING_BY])
    assert await node.instance.workers(JOB) == (grant(),)


async def test_the_death_of_a_worker_that_took_a_gpu_frees_it(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [STANDING_BY])
    await port.start_workers(JOB, "t1", [grant()])
    (reply,) = await replies(port, grant(), about("pid"))
    os.kill(int(reply.started.detail), signal.SIGKILL)
    assert await node.deaths.get() == (grant(), -signal.SIGKILL)
    assert not node.gate.is_held(grant().gpu)


async def test_a_standby_that_died_unseen_keeps_no_gpu(tmp_path: Path, channels: Channels) -> None:
    """Its fork server is stopped, so that nobody tells the service of the death."""
    with fork_server(tmp_path / "fork.sock") as server:
        launcher = await ForkServerLauncher.connect(tmp_path / "fork.sock", timeout_s=20)
        node = Node("n0", tmp_path, launcher, source=GrpcShardSource(channels.connect))
        await node.workers.start([STANDING_BY])
        (reply,) = await replies(node.instance, STANDING_BY, about("pid"))
        server.send_signal(signal.SIGSTOP)
        pidfd = os.pidfd_open(int(reply.started.detail))
        os.kill(int(reply.started.detail), signal.SIGKILL)
        await until_readable(pidfd)
        os.close(pidfd)
        with pytest.raises(WorkerGone, match=r"cannot take it under 1\.1: it is dead"):
            await node.workers.start([grant()])
        assert not node.gate.is_held(grant().gpu)
        server.send_signal(signal.SIGCONT)
        await node.workers.start([grant(counter=2)])
        assert node.gate.is_held(grant().gpu)
        await node.workers.aclose()
        await launcher.close()


async def test_a_start_that_is_refused_leaves_a_standby_worker_as_it_was(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [STANDING_BY])
    held = node.gate.acquire(grant("n0/1", counter=5))
    with pytest.raises(GateClosed, match="n0/1"):
        await port.start_workers(JOB, "t2", [grant(), grant("n0/1", counter=9)])
    assert (await port.workers(JOB), node.gate.is_held(grant().gpu)) == ((STANDING_BY,), False)
    held.close()


async def test_a_start_that_is_refused_leaves_none_of_its_workers(port: Port, node: Node) -> None:
    held = node.gate.acquire(grant("n0/1", counter=5))
    with pytest.raises(GateClosed, match="n0/1"):
        await port.start_workers(JOB, "t1", [grant("n0/0", counter=9), grant("n0/1", counter=9)])
    assert await port.workers(JOB) == ()
    held.close()
    with pytest.raises(StaleToken, match=r"1\.5"):
        await port.start_workers(JOB, "t1", [grant("n0/1", counter=5)])


async def test_replies_stream_and_calls_to_one_worker_do_not_mix(port: Port) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    warm_up = wire.WorkerCall(call_id=41, warm_up=wire.WarmUp(num_steps=3))
    async with aclosing(port.call(grant(), warm_up, timeout_s=60)) as streamed:
        first = await anext(streamed)
        (other,) = await replies(port, grant(), wire.WorkerCall(call_id=41, start_engine=wire.StartEngine()))
        rest = [reply async for reply in streamed]
    assert [reply.warm_up.step for reply in (first, *rest)] == [0, 1, 2]
    assert [reply.last for reply in (first, *rest)] == [False, False, True]
    assert {reply.call_id for reply in (first, other, *rest)} == {41}
    assert other.HasField("started")


async def test_a_refused_call_leaves_the_worker_as_it_was(port: Port) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    with pytest.raises(WorkerRefused, match="does not fit"):
        await replies(port, grant(), wire.WorkerCall(train=wire.Train(update_id="refused")))
    assert len(await replies(port, grant(), about(""))) == 1


async def test_a_call_that_breaks_the_worker_says_why_and_the_workers_death_is_reported_once(
    port: Port, node: Node
) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    with pytest.raises(WorkerGone, match="RuntimeError: this update broke the worker"):
        await replies(port, grant(), wire.WorkerCall(train=wire.Train(update_id="broken")))
    assert await node.deaths.get() == (grant(), 1)
    assert node.reasons == ["train failed in the worker of n0/0: RuntimeError: this update broke the worker"]
    with pytest.raises(WorkerGone, match="no worker runs on n0/0"):
        await replies(port, grant(), about(""))
    assert node.deaths.empty()


async def test_a_killed_worker_fails_its_calls_and_frees_its_gpu(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    (reply,) = await replies(port, grant(), about("pid"))
    async with aclosing(port.call(grant(), wire.WorkerCall(save=wire.Save()), timeout_s=60)) as streamed:
        os.kill(int(reply.started.detail), signal.SIGKILL)
        with pytest.raises(WorkerGone, match="n0/0"):
            await anext(streamed)
    assert await node.deaths.get() == (grant(), -signal.SIGKILL)
    assert not node.gate.is_held(grant().gpu)
    await port.start_workers(JOB, "t2", [grant(counter=2)])


@pytest.mark.parametrize("counter", [1, 3], ids=["older", "newer"])
async def test_a_call_under_another_token_is_refused(port: Port, counter: int) -> None:
    await port.start_workers(JOB, "t1", [grant(counter=2)])
    with pytest.raises(WorkerGone, match=r"runs under 1\.2"):
        await replies(port, grant(counter=counter), about(""))


async def test_a_call_past_its_deadline_is_given_up_by_name(port: Port, node: Node) -> None:
    node.workers._home = replace(node.workers._home, stop_timeout_s=0.5)
    await port.start_workers(JOB, "t1", [grant()])
    with pytest.raises(TimeoutError, match="did not answer save"):
        [reply async for reply in port.call(grant(), wire.WorkerCall(save=wire.Save()), timeout_s=0.1)]


async def test_a_worker_that_does_not_leave_is_killed_by_the_stop(port: Port, node: Node) -> None:
    node.workers._home = replace(node.workers._home, stop_timeout_s=0.5)
    await port.start_workers(JOB, "t1", [grant()])
    with pytest.raises(TimeoutError):
        [reply async for reply in port.call(grant(), wire.WorkerCall(save=wire.Save()), timeout_s=0.05)]
    await port.stop_workers(JOB, "t2", [grant()])
    assert not node.gate.is_held(grant().gpu)
    assert node.deaths.empty()


async def test_the_store_address_is_where_the_worker_listens(port: Port) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    host, number = await port.store_address(grant())
    (reply,) = await replies(port, grant(), about("listener"))
    assert (host, reply.started.detail) == ("127.0.0.1", str(number))


async def test_a_timeline_that_cannot_be_written_ends_no_worker(port: Port, node: Node) -> None:
    node.timeline.mkdir()
    await port.start_workers(JOB, "t1", [grant()])
    for _ in range(2):
        assert await replies(port, grant(), about("random"))
    assert await port.workers(JOB) == (grant(),)
    assert node.deaths.empty()


async def test_the_timeline_has_the_slot_contiguous_from_start_to_stop(port: Port, node: Node) -> None:
    await port.start_workers(JOB, "t1", [grant()])
    await replies(port, grant(), wire.WorkerCall(warm_up=wire.WarmUp(num_steps=2)))
    await port.stop_workers(JOB, "t2", [grant()])
    *spans, released = [json.loads(line) for line in node.timeline.read_text().splitlines()]
    assert {line["gpu"] for line in (*spans, released)} == {"n0/0"}
    assert all(before["end_ns"] == after["start_ns"] for before, after in pairwise(spans))
    assert released["released_ns"] >= spans[-1]["end_ns"]
    states = [span["state"] for span in spans]
    want = ["starting", "waiting_prompts", "training", "waiting_prompts"]
    assert [state for state, before in zip(states, [None, *states], strict=False) if state != before] == want


async def test_a_request_for_another_job_is_refused(port: Port) -> None:
    with pytest.raises(ValueError, match="serves job 'demo', not 'other'"):
        await port.start_workers(type(JOB)("other"), "t1", [grant()])


async def test_a_gpu_that_the_node_has_not_is_refused_and_nothing_starts(port: Port) -> None:
    with pytest.raises(UnknownGpu, match=r"n0/9: no GPU of node n0, which has n0/0, n0/1, n0/2, n0/3"):
        await port.start_workers(JOB, "t1", [grant(), grant("n0/9")])
    assert await port.workers(JOB) == ()


async def test_a_refusal_has_a_status_of_its_own(node: Node) -> None:
    server = await serve(services_of(node), "127.0.0.1:0")
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        stub: instance_pb2_grpc.InstanceAsyncStub = instance_pb2_grpc.InstanceStub(channel)
        await node.instance.start_workers(JOB, "t1", [grant()])
        stale = instance_pb2.StandDownRequest(job=JOB, grants=encode_grants([replace(grant(), token=Token(1, 9))]))
        beside = instance_pb2.StartWorkersRequest(job=JOB, grants=encode_grants([replace(grant(), token=NO_TOKEN)]))
        strange = instance_pb2.StartWorkersRequest(job=JOB, grants=encode_grants([grant("n0/9")]))
        calls: dict[grpc.StatusCode, list[Awaitable[object]]] = {
            grpc.StatusCode.FAILED_PRECONDITION: [
                stub.StandDown(stale, timeout=5),
                stub.StartWorkers(beside, timeout=5),
            ],
            grpc.StatusCode.NOT_FOUND: [stub.StartWorkers(strange, timeout=5)],
        }
        for want, refused in calls.items():
            for call in refused:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                assert error.value.code() is want, error.value.details()
    assert await node.instance.workers(JOB) == (grant(),), "the worker goes on"
    await server.stop(grace_s=0)


async def test_bad_grants_on_the_wire_are_refused_by_field(node: Node, channels: Channels) -> None:
    server = await serve(services_of(node), "127.0.0.1:0")
    stub = instance_pb2_grpc.InstanceStub(channels.connect(server.endpoint))
    described = await stub.DescribeWorkers(instance_pb2.DescribeWorkersRequest(job=JOB), timeout=5)
    assert described.boot == 7
    with pytest.raises(Exception, match=r"CallRequest\.call is missing"):
        [reply async for reply in stub.Call(instance_pb2.CallRequest(), timeout=5)]
    with pytest.raises(Exception, match=r"WorkerCall\.token is missing"):
        [reply async for reply in stub.Call(instance_pb2.CallRequest(call=wire.WorkerCall(gpu="n0/0")), timeout=5)]
    await server.stop(grace_s=0)
