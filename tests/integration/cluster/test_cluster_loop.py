"""The cluster's scheduler on a store in memory: replicas share the jobs, and GPUs that were left behind become free."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.scheduler.cluster.control import ClusterServicer, UnknownSubmission
from services.scheduler.cluster.loop import LOST_AFTER_S, ClusterLoop, KeptQueueAway
from tests.contract.store_bench import JOB, acquire, start_of_actor
from tests.unit.cluster_jobs import NODES, of_size, submitted
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import RpcServer, Service, serve
from tidegate.adapters.memory_bus import MemoryBus, MemoryJobStreams, MemoryTermRegister
from tidegate.adapters.memory_store import MemoryServer, memory_store
from tidegate.cluster.folder import ClusterDescription
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.cluster.placement import cluster_gpus
from tidegate.cluster.slots import Slots
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.codec import encode_gate_state
from tidegate.ownership.records import GateState, GpuState, Outcome, StoreUnavailable, VersionConflict
from tidegate.ports.bus import JobNotOpen
from tidegate.ports.store import Submissions
from tidegate.types import Drain, GpuId, JobId, Layout, NodeId, Role, Token
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc

ONE = JobId("one")
ALL = cluster_gpus(NODES)


@dataclass
class Machine(cluster_pb2_grpc.NodeServicer):
    """An agent whose jobs are numbers. `away`: so many calls get no answer. `refuses`: why it starts no job."""

    starts: dict[str, cluster_pb2.JobStart] = field(default_factory=dict)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: list[tuple[str, bool]] = field(default_factory=list)
    held: set[GpuId] = field(default_factory=set)
    away: int = 0
    refuses: str = ""
    away_nodes: list[cluster_pb2.NodeAway] = field(default_factory=list)

    async def GetNode(self, request: cluster_pb2.GetNodeRequest, context: Any) -> cluster_pb2.GetNodeResponse:
        if self.away:
            self.away -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        gates = [encode_gate_state(GateState(gpu, Token(1, 1), gpu in self.held)) for gpu in ALL]
        return cluster_pb2.GetNodeResponse(
            version=len(self.starts),
            num_slots={"n0": 8},
            device="cpu",
            slots_per_gpu=1,
            jobs=self.starts.values(),
            gates=gates,
            away=self.away_nodes,
            host_memory=[cluster_pb2.HostMemory(nodes=["n0"], total_bytes=1 << 30)],
        )

    async def GetMachineOfNode(
        self, request: cluster_pb2.GetNodeMachineRequest, context: Any
    ) -> cluster_pb2.GetNodeMachineResponse:
        return cluster_pb2.GetNodeMachineResponse(name=f"of {request.node}")

    async def StartJob(self, request: cluster_pb2.StartJobRequest, context: Any) -> cluster_pb2.StartJobResponse:
        self.was_asked.set()
        if self.refuses:
            raise OSError(errno.ENOSPC, self.refuses)
        self.starts[request.job] = cluster_pb2.JobStart(job=request.job, start=request.start)
        return cluster_pb2.StartJobResponse()

    async def StopJob(self, request: cluster_pb2.StopJobRequest, context: Any) -> cluster_pb2.StopJobResponse:
        self.stopped.append((request.job, request.cancels))
        return cluster_pb2.StopJobResponse()


@dataclass
class Lab:
    server: MemoryServer
    machine: Machine
    agent: RpcServer
    channels: Channels
    queue: Path
    terms: MemoryTermRegister = field(default_factory=MemoryTermRegister)
    streams: MemoryJobStreams = field(default_factory=lambda: MemoryBus().streams)

    async def replica(self) -> tuple[ClusterLoop, CellStore]:
        store = memory_store(self.server)
        stub = cluster_pb2_grpc.NodeStub(self.channels.connect(self.agent.endpoint))
        loop = ClusterLoop(store, self.terms, self.streams, stub, KeptQueue(self.queue))
        await loop.open()
        return loop, store


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    machine = Machine()
    descriptor = cluster_pb2.DESCRIPTOR.services_by_name["Node"]
    served = Service(descriptor, lambda server: cluster_pb2_grpc.add_NodeServicer_to_server(machine, server))
    agent = await serve([served], "127.0.0.1:0")
    channels = Channels(default_timeout_s=60.0)
    yield Lab(MemoryServer(), machine, agent, channels, tmp_path / "queue")
    await channels.close()
    await agent.stop(grace_s=0.0)


async def queued(loop: ClusterLoop, *records: Submission) -> None:
    """Each with a config of its size in the store."""
    for each in records:
        name = await loop.store.keep_config(each.job, of_size(each.job, each.num_gpus).to_json())
        each = replace(each, config=name)
        await loop.change(each.job, lambda _, each=each: each)  # type: ignore[misc]  # each round's own record


async def test_of_two_replicas_that_decide_at_once_one_places_a_job(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), (second, store) = await lab.replica(), await lab.replica()
    await queued(first, submitted(ONE, 6))
    reads = store.submissions

    async def overtaken() -> Submissions:
        found = await reads()
        await queued(first, submitted("urgent", 6, priority=1))
        await first.round()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(store, "submissions", overtaken)
        with pytest.raises(VersionConflict, match="round 1 has placed jobs, after round 0"):
            await second.round()
    await second.round()
    assert [*lab.machine.starts] == ["urgent"]
    found = await second.submissions()
    assert (found[JobId("urgent")].gpus, found[ONE].state) == (ALL[:6], SubmissionState.QUEUED)


async def test_a_job_runs_from_its_submission_to_its_end_and_the_next_gets_its_gpus(lab: Lab) -> None:
    loop, _ = await lab.replica()
    await queued(loop, submitted(ONE, 6), submitted("two", 6, at_ms=2000))
    for _ in range(2):
        await loop.round()
    assert (await loop.submissions())[ONE].state is SubmissionState.RUNNING
    lab.machine.starts[ONE].end, lab.machine.starts[ONE].message = "finished", "done"
    await loop.round()
    found = await loop.submissions()
    assert (found[ONE].end, found[ONE].message) == ("finished", "done")
    assert found[JobId("two")].gpus == ALL[:6]


async def test_a_config_that_cannot_be_used_ends_its_job_and_no_other(lab: Lab) -> None:
    loop, _ = await lab.replica()
    await queued(loop, submitted("good", 3))
    await loop.change(ONE, lambda _: submitted(ONE, 3))
    for _ in range(2):
        await loop.round()
    found = await loop.submissions()
    assert (found[ONE].end, found[JobId("good")].state) == ("failed", SubmissionState.RUNNING)
    assert "its config cannot be used here" in found[ONE].message


async def test_a_start_that_the_agent_refuses_is_told_once_and_tried_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, store = await lab.replica()
    servicer, told = ClusterServicer(loop, store, CLUSTER), list[str]()
    write = store.write_submissions

    async def noted(texts: Any, **kwargs: Any) -> None:
        told.extend(Submission.parse(text).message for text in texts.values())
        await write(texts, **kwargs)

    await queued(loop, submitted(ONE))
    with monkeypatch.context() as patched:
        patched.setattr(store, "write_submissions", noted)
        for refuses in ("no room", "no room", "no room", "still none", "still none", ""):
            lab.machine.refuses = refuses
            lab.machine.was_asked.clear()
            await loop.round()
            assert lab.machine.was_asked.is_set()
            (shown,) = (await servicer.ListSubmissions(cluster_pb2.ListSubmissionsRequest(), None)).submissions
            assert (shown.state, shown.message) == ("placed", told[-1])
        await loop.round()
    no_room, still_none = (
        f"cannot start yet: OSError: [Errno 28] {why}; it is tried again each second"
        for why in ("no room", "still none")
    )
    assert told == ["", no_room, still_none, ""]
    found = (await loop.submissions())[ONE]
    assert (found.state, found.starts) == (SubmissionState.RUNNING, 1)


async def test_a_job_that_ended_has_nothing_in_the_stores_any_more(lab: Lab) -> None:
    loop, store = await lab.replica()
    await queued(loop, replace(submitted(ONE), state=SubmissionState.ENDED, end="failed", starts=1))
    await lab.streams.open_job(ONE)
    await store.save(ONE, b"state", expected_write=0, version=1)
    lab.machine.starts[ONE] = cluster_pb2.JobStart(job=ONE, start=1)
    await loop.round()
    assert await store.load(ONE) is not None, "a process of it lives"
    lab.machine.starts[ONE].end = "failed"
    await loop.round()
    assert await store.load(ONE) is None
    with pytest.raises(JobNotOpen):
        await lab.streams.require_job(ONE)
    assert (await loop.submissions())[ONE].is_cleared


async def left_behind(store: CellStore) -> None:
    """What a killed `JOB` leaves: two GPUs that its actor owns, and one in an open transition."""
    token = (await store.gpus())[ALL[0]].token
    started = await acquire(store, await store.plan(start_of_actor(*ALL[:2], tokens=token)))
    await store.commit(started, Role.ACTOR, Layout(dp=2))
    await store.close(started, Outcome.COMMITTED)
    await store.plan(start_of_actor(ALL[2], name="more", tokens=token))


async def test_gpus_that_a_killed_job_left_behind_are_free_but_one_that_a_process_holds(lab: Lab) -> None:
    loop, store = await lab.replica()
    await queued(loop, replace(submitted(JOB), state=SubmissionState.ENDED, end="interrupted", starts=1))
    await left_behind(store)
    lab.machine.held = {ALL[1]}
    await loop.round()
    records = await store.gpus()
    assert [records[gpu].state for gpu in ALL[:3]] == [GpuState.FREE, GpuState.OWNED, GpuState.FREE]
    assert not (await store.contents()).transitions
    lab.machine.held = set()
    await loop.round()
    assert (await store.gpus())[ALL[1]].state is GpuState.FREE


async def test_no_gpu_whose_machine_is_away_is_touched_or_given_to_a_job(lab: Lab) -> None:
    loop, store = await lab.replica()
    await queued(loop, replace(submitted(JOB), state=SubmissionState.ENDED, end="interrupted", starts=1))
    await left_behind(store)
    lab.machine.away_nodes = [cluster_pb2.NodeAway(node="n0", seconds=LOST_AFTER_S / 2)]
    await queued(loop, submitted(ONE))
    await loop.round()
    owned = {gpu for gpu, record in (await store.gpus()).items() if record.state is GpuState.OWNED}
    assert owned.issuperset(ALL[:2])
    assert (await loop.submissions())[ONE].state is SubmissionState.QUEUED
    assert [each.node for each in loop.away] == ["n0"]
    lab.machine.away_nodes = []
    await loop.round()
    assert (await loop.submissions())[ONE].state is SubmissionState.PLACED


async def test_a_store_that_restarts_while_a_machine_is_away_has_its_gpus_lost_until_it_is_back(lab: Lab) -> None:
    loop, store = await lab.replica()
    lab.machine.held = {ALL[0]}
    lab.machine.away_nodes = [cluster_pb2.NodeAway(node="n0", seconds=1.0)]
    lab.server.restart()
    await loop.open()
    assert {record.state for record in (await store.gpus()).values()} == {GpuState.LOST}
    await loop.round()
    assert {record.state for record in (await store.gpus()).values()} == {GpuState.LOST}
    lab.machine.away_nodes = []
    await loop.round()
    states = {gpu: record.state for gpu, record in (await store.gpus()).items()}
    assert states == dict.fromkeys(ALL, GpuState.FREE) | {ALL[0]: GpuState.LOST}


async def test_a_job_is_interrupted_once_its_machine_is_away_for_long(lab: Lab) -> None:
    loop, _ = await lab.replica()
    lab.machine.starts[ONE] = cluster_pb2.JobStart(job=ONE, start=1)
    await queued(loop, replace(submitted(ONE), state=SubmissionState.RUNNING, gpus=ALL[:4], starts=1))
    short_s, long_s = LOST_AFTER_S - 1, LOST_AFTER_S + 1
    for seconds, of_another_release, stopped in (
        (short_s, False, []),
        (long_s, True, []),
        (long_s, False, [(ONE, False)]),
    ):
        away = cluster_pb2.NodeAway(node="n0", seconds=seconds, keeps_jobs=of_another_release)
        lab.machine.away_nodes = [away]
        await loop.round()
        assert lab.machine.stopped == stopped


async def test_what_a_placed_job_left_on_other_gpus_is_set_free(lab: Lab) -> None:
    """Those of a machine that was away while the job went on elsewhere."""
    loop, store = await lab.replica()
    lab.machine.starts[JOB] = cluster_pb2.JobStart(job=JOB, start=2)
    await queued(loop, replace(submitted(JOB), state=SubmissionState.RUNNING, gpus=ALL[4:], starts=2))
    token = (await store.gpus())[ALL[0]].token
    started = await acquire(store, await store.plan(start_of_actor(*ALL[:2], tokens=token)))
    await store.commit(started, Role.ACTOR, Layout(dp=2))
    await store.close(started, Outcome.COMMITTED)
    await loop.round()
    assert {record.state for record in (await store.gpus()).values()} == {GpuState.FREE}


async def test_nothing_of_a_placed_job_is_touched(lab: Lab) -> None:
    loop, store = await lab.replica()
    lab.machine.starts[JOB] = cluster_pb2.JobStart(job=JOB, start=1)
    await queued(loop, replace(submitted(JOB), state=SubmissionState.RUNNING, gpus=ALL[:4], starts=1))
    await left_behind(store)
    before = await store.gpus()
    await loop.round()
    assert await store.gpus() == before
    assert len((await store.contents()).transitions) == 1


async def test_an_agent_that_does_not_answer_and_a_store_that_restarted_are_asked_again(lab: Lab) -> None:
    loop, store = await lab.replica()
    await queued(loop, submitted(ONE))
    before = lab.server.identity.term
    lab.machine.away = 2
    lab.server.restart()
    stopping = asyncio.Event()
    task = asyncio.create_task(loop.run(stopping))
    await asyncio.wait_for(lab.machine.was_asked.wait(), 60)
    stopping.set()
    await asyncio.wait_for(task, 60)
    assert (await store.attach()).term == before + 1


CLUSTER = ClusterDescription(Slots(NODES), "nats://", "redis://", "", "")


def request(job: str, num_gpus: int = 4, **fields: Any) -> cluster_pb2.SubmitJobRequest:
    return cluster_pb2.SubmitJobRequest(config=of_size(job, num_gpus).to_json(), treatment="fresh", **fields)


async def test_a_job_that_can_never_run_is_refused_and_nothing_is_written(lab: Lab) -> None:
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    with pytest.raises(ValueError, match=r"needs 9 GPUs .* n0 has 8"):
        await servicer.SubmitJob(request(ONE, 9), None)
    await loop.round()
    with pytest.raises(ValueError, match=r"needs 2\.0 GiB of host memory on each of its nodes; n0 has 1\.0 GiB"):
        await servicer.SubmitJob(request(ONE, 4, node_bytes=2 << 30), None)
    with pytest.raises(ValueError, match="config"):
        await servicer.SubmitJob(cluster_pb2.SubmitJobRequest(config="{", treatment="fresh"), None)
    assert not (await store.submissions()).texts


async def test_a_node_that_is_drained_gets_no_job_until_that_is_undone(lab: Lab) -> None:
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    with pytest.raises(LookupError, match=r"no node 'n7': it has n0"):
        await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node="n7"), None)
    found = await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node="n0"), None)
    assert found.drained_nodes == ["n0"]
    await queued(loop, submitted(ONE, 4))
    await loop.round()
    assert not lab.machine.starts
    await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node="n0", undo=True), None)
    await loop.round()
    assert [*lab.machine.starts] == [ONE]
    await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node="n0", keeps_jobs=True), None)
    await loop.round()
    there = await servicer.ListClusterGpus(cluster_pb2.ListClusterGpusRequest(), None)
    assert there.nodes_keeping_jobs == there.drained_nodes == ["n0"]
    assert not lab.machine.stopped
    await servicer.DrainNode(cluster_pb2.DrainNodeRequest(node="n0"), None)
    await loop.round()
    assert lab.machine.stopped == [(ONE, False)]


async def test_a_paused_queue_says_why_jobs_wait_until_that_is_undone(lab: Lab) -> None:
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    with pytest.raises(ValueError, match="a pause needs a reason"):
        await servicer.PauseQueue(cluster_pb2.PauseQueueRequest(reason=" "), None)
    await servicer.PauseQueue(cluster_pb2.PauseQueueRequest(reason="new disks"), None)
    await queued(loop, submitted(ONE, 4))
    await loop.round()
    assert not lab.machine.starts
    assert (await servicer.ListClusterGpus(cluster_pb2.ListClusterGpusRequest(), None)).paused == "new disks"
    (waits,) = (await servicer.ListSubmissions(cluster_pb2.ListSubmissionsRequest(), None)).submissions
    assert waits.message == "waits for 4 GPUs; the queue is paused: new disks"
    assert not (await servicer.PauseQueue(cluster_pb2.PauseQueueRequest(undo=True), None)).paused
    await loop.round()
    assert [*lab.machine.starts] == [ONE]


async def test_a_job_is_not_submitted_a_second_time_before_it_has_ended(lab: Lab) -> None:
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    await servicer.SubmitJob(request(ONE, priority=-2), None)
    with pytest.raises(ValueError, match="job one is queued already: wait for its end"):
        await servicer.SubmitJob(request(ONE), None)
    cancelled = await servicer.CancelSubmission(cluster_pb2.CancelSubmissionRequest(job=ONE), None)
    assert cancelled.submission.is_cancelled
    await loop.round()
    with pytest.raises(ValueError, match=r"over already \(cancelled\)"):
        await servicer.CancelSubmission(cluster_pb2.CancelSubmissionRequest(job=ONE), None)
    assert (await servicer.SubmitJob(request(ONE), None)).submission.state == "queued"
    with pytest.raises(UnknownSubmission, match="no job 'two'"):
        await servicer.CancelSubmission(cluster_pb2.CancelSubmissionRequest(job="two"), None)
    await servicer.SubmitJob(request("two", 3), None)
    # Of a node that the cluster had before its last start.
    await store.register((GpuId("gone/0"),))
    gpus = (await servicer.ListClusterGpus(cluster_pb2.ListClusterGpusRequest(), None)).gpus
    assert {(each.gpu, each.state, each.job) for each in gpus} == {(gpu, "free", "") for gpu in ALL}
    listed = (await servicer.ListSubmissions(cluster_pb2.ListSubmissionsRequest(), None)).submissions
    assert [(each.job, each.state, each.num_gpus, each.message) for each in listed] == [
        ("one", "queued", 4, "waits for 4 GPUs"),
        ("two", "queued", 3, "waits for 3 GPUs, behind 1 job"),
    ]


async def test_a_backed_up_queue_goes_on_in_its_order_in_a_new_store(lab: Lab) -> None:
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    await servicer.SubmitJob(request("urgent", 6, priority=9), None)
    await loop.round()
    for job, priority in (("late", -5), (ONE, 0)):
        await servicer.SubmitJob(request(job, priority=priority), None)
    await loop.round()
    assert {*lab.machine.starts} == {"urgent"}
    told = [each.job async for each in servicer.BackUpJobs(cluster_pb2.BackUpJobsRequest(), None)]
    assert [Submission.parse(each.record).job for each in told] == ["urgent", ONE, "late"]
    lab.machine.starts.clear()
    new = replace(lab, server=MemoryServer(), terms=MemoryTermRegister(), queue=lab.queue / "new")
    loop, store = await new.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    for each in told:
        answer = await servicer.RestoreJob(cluster_pb2.RestoreJobRequest(job=each), None)
        assert (answer.submission.state, answer.was_known) == ("queued", False)
        await loop.round()
    assert {job: start.start for job, start in lab.machine.starts.items()} == {"urgent": 2}
    assert all(text for text in [await store.config_of(job, _config_name(each)) for job, each in _named(told)])


async def test_the_kept_queue_goes_on_as_it_was_in_a_new_store(lab: Lab) -> None:
    """Whatever was answered before the store, the bus and the agent were lost."""
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    await servicer.SubmitJob(request("runs", 6), None)
    await loop.round()
    await loop.round()
    for job in ("over", "waits", "cancelled"):
        await servicer.SubmitJob(request(job), None)
    await servicer.CancelSubmission(cluster_pb2.CancelSubmissionRequest(job="over"), None)
    await loop.round()
    await loop.keep()
    assert (await loop.submissions())[JobId("over")].state is SubmissionState.ENDED
    await servicer.CancelSubmission(cluster_pb2.CancelSubmissionRequest(job="cancelled"), None)
    await loop.drain(NodeId("n1"), Drain.STAY)
    await loop.pause("new disks")
    before, term = (await store.submissions()).texts, (await store.identity()).term
    lab.machine.starts.clear()

    new = replace(lab, server=MemoryServer(), terms=MemoryTermRegister())
    loop, store = await new.replica()
    after = await store.submissions()
    assert (after.texts, after.drained, after.paused) == (before, {NodeId("n1"): Drain.STAY}, "new disks")
    await loop.pause("")
    assert (await store.identity()).term > term
    await loop.round()
    found = await loop.submissions()
    assert {job: each.state for job, each in found.items()} == {
        "runs": SubmissionState.PLACED,
        "over": SubmissionState.ENDED,
        "waits": SubmissionState.QUEUED,
        "cancelled": SubmissionState.ENDED,
    }
    runs = found[JobId("runs")]
    assert (runs.starts, runs.interruptions, runs.treatment) == (2, 0, Treatment.RESUME)
    assert await store.config_of(JobId("waits"), found[JobId("waits")].config)


async def test_an_answer_waits_until_the_store_has_its_jobs_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = await lab.replica()
    await ClusterServicer(loop, loop.store, CLUSTER).SubmitJob(request(ONE, 6), None)
    new = replace(lab, server=MemoryServer(), terms=MemoryTermRegister())
    loop, store = await new.replica()
    begun, goes_on = asyncio.Event(), asyncio.Event()
    register = store.register

    async def slowly(gpus: Any) -> None:
        begun.set()
        await goes_on.wait()
        await register(gpus)

    new.server.lose_data()
    monkeypatch.setattr(store, "register", slowly)
    opening = asyncio.create_task(loop.open())
    await begun.wait()
    again = asyncio.create_task(ClusterServicer(loop, store, CLUSTER).SubmitJob(request(ONE, 6), None))
    done, _ = await asyncio.wait({again}, timeout=0.1)
    assert not done
    goes_on.set()
    await opening
    with pytest.raises(ValueError, match="job one is queued already"):
        await again


async def test_a_store_that_fails_while_it_is_opened_is_opened_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is open then, without its jobs."""
    loop, store = await lab.replica()
    await ClusterServicer(loop, store, CLUSTER).SubmitJob(request(ONE), None)
    await loop.drain(NodeId("n1"), Drain.STAY)
    register, answers = store.register, [False, False]

    async def fails_twice(gpus: Any) -> None:
        if answers:
            answers.pop()
            raise StoreUnavailable("it is busy")
        await register(gpus)

    monkeypatch.setattr(store, "register", fails_twice)
    lab.server.lose_data()
    stopping = asyncio.Event()
    running = asyncio.create_task(loop.run(stopping))
    await asyncio.wait_for(lab.machine.was_asked.wait(), 60)
    assert {*(await loop.submissions())} == {ONE}
    assert (await loop.stored()).drained == {NodeId("n1"): Drain.STAY}
    assert not answers
    stopping.set()
    await asyncio.wait_for(running, 60)
    assert KeptQueue(lab.queue).read().drained == {NodeId("n1"): Drain.STAY}


async def test_a_call_that_is_cut_off_lets_nobody_else_write_before_its_own_write_is_over(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = await lab.replica()
    goes_on, writing = threading.Event(), threading.Semaphore(1)
    write = loop._kept.write
    at_once = []

    def slowly(*args: Any, **kwargs: Any) -> None:
        at_once.append(writing.acquire(blocking=False))
        goes_on.wait(10)
        write(*args, **kwargs)
        writing.release()

    monkeypatch.setattr(loop._kept, "write", slowly)
    cut_off = asyncio.create_task(loop.keep())
    await asyncio.sleep(0.1)
    cut_off.cancel()
    second = asyncio.create_task(loop.keep())
    await asyncio.sleep(0.1)
    goes_on.set()
    await second
    assert at_once == [True, True]


async def test_a_queue_that_cannot_be_kept_is_told(lab: Lab) -> None:
    loop, store = await lab.replica()
    await asyncio.to_thread(shutil.rmtree, lab.queue)
    lab.queue.write_bytes(b"no folder")
    with pytest.raises(KeptQueueAway, match=r"the change was made, and cannot be kept in .*queue \("):
        await ClusterServicer(loop, store, CLUSTER).SubmitJob(request(ONE), None)
    lab.queue.unlink()
    await loop.round()
    await loop.keep()
    assert [path.name for path in lab.queue.glob("*/one.json")] == ["one.json"] * 2


def _named(told: list[cluster_pb2.BackedUpJob]) -> list[tuple[JobId, cluster_pb2.BackedUpJob]]:
    return [(Submission.parse(each.record).job, each) for each in told]


def _config_name(each: cluster_pb2.BackedUpJob) -> str:
    return Submission.parse(each.record).config


async def test_a_job_that_is_there_stays_and_a_damaged_one_is_refused(lab: Lab) -> None:
    loop, store = await lab.replica()
    servicer = ClusterServicer(loop, store, CLUSTER)
    for job in (ONE, "two"):
        await servicer.SubmitJob(request(job), None)
    told = [each.job async for each in servicer.BackUpJobs(cluster_pb2.BackUpJobsRequest(), None)]
    before = (await store.submissions()).texts
    again = await servicer.RestoreJob(cluster_pb2.RestoreJobRequest(job=told[0]), None)
    assert (again.was_known, again.submission.num_starts) == (True, 0)
    damaged = cluster_pb2.BackedUpJob(record=told[0].record, config=told[1].config)
    with pytest.raises(ValueError, match="the config of job one is not the one"):
        await servicer.RestoreJob(cluster_pb2.RestoreJobRequest(job=damaged), None)
    assert (await store.submissions()).texts == before


async def test_a_job_whose_config_the_store_has_lost_is_backed_up_without_it(lab: Lab) -> None:
    loop, store = await lab.replica()
    await loop.change(ONE, lambda _: submitted(ONE))
    servicer = ClusterServicer(loop, store, CLUSTER)
    told = [each.job async for each in servicer.BackUpJobs(cluster_pb2.BackUpJobsRequest(), None)]
    assert [(Submission.parse(each.record).job, each.config) for each in told] == [(ONE, "")]
