"""The workers of a component as its lead sees them: the members, the nodes that are called, the effect of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from tests.component_bench import JOB, NODES, FakeInstance, job_config, loaded, replied, snapshot
from tidegate.runtime.crew import Crew, SnapshotMismatch, WorkerGone, WorkerRefused, WorkerUnreachable, together
from tidegate.types import GpuId, Grant, NodeId, Token
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

ON_N0, ON_N0_TOO, ON_N1 = (Grant(GpuId(gpu), Token(1, 1)) for gpu in ("n0/0", "n0/1", "n1/0"))
HELLO = wire.WorkerCall(abort=wire.Abort())


class Echo:
    """Answers with its GPU, in two replies, and refuses updates."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.loads: list[wire.LoadShards] = []
        self.heard = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        match call.WhichOneof("body"):
            case "train":
                raise WorkerRefused("this update does not fit")
            case "load_shards":
                self.loads.append(call.load_shards)
                yield loaded(call)
            case _:
                self.heard.set()
                yield replied(call, wire.Started(detail="working"), last=False)
                await self.may_answer.wait()
                yield replied(call, wire.Started(detail=self.grant.gpu))


class Instance(FakeInstance[Echo]):
    """Lets a test look at its workers."""

    def worker(self, grant: Grant) -> Echo:
        return self._slots[grant.gpu].worker


class Cluster:
    def __init__(self, tmp_path: Path) -> None:
        config = job_config(tmp_path)
        self.instances = {node: Instance(node, config, Echo) for node in NODES}
        self.connected: list[tuple[str, str]] = []

    def crew(self, *, nodes: Sequence[NodeId] = NODES) -> Crew:
        crew = Crew(JOB, self._connect, call_timeout_s=5.0, work_timeout_s=50.0)
        crew.note_addresses(
            commands_pb2.InstanceAddress(instance=f"actor@{node}", endpoint=f"at-{node}", boot=1) for node in nodes
        )
        return crew

    def worker(self, grant: Grant) -> Echo:
        return self.instances[NodeId(grant.gpu.partition("/")[0])].worker(grant)

    def _connect(self, instance: str, endpoint: str) -> Instance:
        self.connected.append((instance, endpoint))
        return self.instances[NodeId(instance.partition("@")[2])]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def test_a_stop_under_an_older_grant_leaves_the_member_that_came_later(cluster: Cluster) -> None:
    crew, later = cluster.crew(), Grant(ON_N0.gpu, Token(1, 2))
    await crew.start([later], transition="start")
    await crew.stop([ON_N0], transition="stop")
    assert crew.members == (later,)
    assert [reply.started.detail for reply in await crew.ask_all({later: HELLO})] == ["n0/0"]


async def test_workers_are_started_on_their_own_nodes_and_are_members_then(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N1, ON_N0, ON_N0_TOO], transition="start")
    assert crew.members == (ON_N1, ON_N0, ON_N0_TOO), "in rank order"
    assert cluster.instances[NODES[0]].started == [ON_N0, ON_N0_TOO]
    assert cluster.instances[NODES[1]].started == [ON_N1]


async def test_a_call_brings_the_replies_of_the_worker_that_holds_the_grant(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N1], transition="start")
    assert (await crew.ask(ON_N1, HELLO)).started.detail == "n1/0"
    assert [reply.started.detail async for reply in crew.stream(ON_N0, HELLO)] == ["working", "n0/0"]
    answers = await crew.ask_all(dict.fromkeys((ON_N1, ON_N0), HELLO))
    assert [reply.started.detail for reply in answers] == ["n1/0", "n0/0"]


async def test_a_call_under_an_old_token_reaches_nobody(cluster: Cluster) -> None:
    crew = cluster.crew()
    newer = Grant(ON_N0.gpu, Token(2, 1))
    await crew.start([newer], transition="start")
    with pytest.raises(WorkerGone):
        await crew.ask(ON_N0, HELLO)
    assert crew.members == (newer,), "the failure of an earlier holder says nothing of this one"


async def test_a_worker_that_died_in_a_call_is_no_member_any_more(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N1], transition="start")
    worker = cluster.worker(ON_N0)
    worker.may_answer.clear()
    asked = asyncio.create_task(crew.ask(ON_N0, HELLO))
    await worker.heard.wait()
    cluster.instances[NODES[0]].kill(ON_N0.gpu)
    with pytest.raises(WorkerGone):
        await asked
    assert crew.members == (ON_N1,)


async def test_a_worker_whose_instance_gives_no_answer_is_removed_and_named_by_its_grant(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N1], transition="start")
    cluster.instances[NODES[0]].is_silent = True
    with pytest.raises(WorkerUnreachable) as unreachable:
        await crew.ask_all(dict.fromkeys((ON_N0, ON_N1), HELLO))
    assert unreachable.value.grants == (ON_N0,)
    assert crew.members == (ON_N1,)


async def test_a_glance_that_gets_no_answer_says_nothing_about_the_worker(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N1], transition="start")
    seen = await crew.glance(ON_N0, HELLO, timeout_s=5.0)
    assert seen is not None
    assert seen.started.detail == ON_N0.gpu

    cluster.instances[NODES[1]].is_silent = True
    cluster.instances[NODES[0]].worker(ON_N0).may_answer.clear()
    assert await crew.glance(ON_N1, HELLO, timeout_s=5.0) is None
    assert await crew.glance(ON_N0, HELLO, timeout_s=0.001) is None
    assert await crew.glance(ON_N0, wire.WorkerCall(train=wire.Train()), timeout_s=5.0) is None
    assert crew.members == (ON_N0, ON_N1)


async def test_work_may_take_longer_than_what_is_bounded_like_a_command(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0], transition="start")
    works = [wire.WorkerCall(warm_up=wire.WarmUp()), wire.WorkerCall(generate=wire.Generate())]
    for call in [*works, wire.WorkerCall(score=wire.Score()), HELLO, wire.WorkerCall(publish=wire.Publish())]:
        await crew.ask(ON_N0, call)
    assert cluster.instances[NODES[0]].timeouts_s == [50.0, 50.0, 50.0, 5.0, 5.0]


async def test_a_worker_that_refuses_stays_a_member(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0], transition="start")
    with pytest.raises(WorkerRefused, match="does not fit"):
        await crew.ask(ON_N0, wire.WorkerCall(train=wire.Train()))
    assert crew.members == (ON_N0,)


async def test_the_first_failure_of_a_call_to_all_is_raised_without_waiting_for_the_others(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N1], transition="start")
    for grant in (ON_N0, ON_N1):
        cluster.worker(grant).may_answer.clear()
    asked = asyncio.create_task(crew.ask_all(dict.fromkeys((ON_N0, ON_N1), HELLO)))
    await cluster.worker(ON_N0).heard.wait()
    await cluster.worker(ON_N1).heard.wait()
    cluster.instances[NODES[1]].kill(ON_N1.gpu)
    with pytest.raises(WorkerGone):
        await asked
    assert crew.members == (ON_N0,)


async def test_a_node_without_a_known_instance_is_named_with_those_that_are_known(cluster: Cluster) -> None:
    crew = cluster.crew(nodes=NODES[:1])
    with pytest.raises(WorkerGone, match=r"no instance .* node n1; known: \['n0'\]"):
        await crew.start([ON_N1], transition="start")
    with pytest.raises(WorkerGone):
        crew.endpoint(NODES[1])
    assert crew.endpoint(NODES[0]) == "at-n0"
    assert crew.members == ()


async def test_stopped_workers_are_no_members_also_when_they_were_dead(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N1], transition="start")
    cluster.instances[NODES[1]].kill(ON_N1.gpu)
    assert await crew.stop([ON_N0, ON_N1], transition="stop") == 0
    assert crew.members == ()
    assert await cluster.instances[NODES[0]].workers(JOB) == ()


async def test_a_new_lead_finds_the_workers_that_run_and_passes_over_nodes_that_do_not_answer(cluster: Cluster) -> None:
    await cluster.crew().start([ON_N0, ON_N1], transition="start")
    heir = cluster.crew()
    assert await heir.take_over() == ()
    assert set(heir.members) == {ON_N0, ON_N1}
    cluster.instances[NODES[1]].is_silent = True
    assert await heir.take_over() == NODES[1:]
    assert heir.members == (ON_N0,)


async def test_rendezvous_is_in_rank_order_at_the_store_of_the_first_member(cluster: Cluster) -> None:
    seats = await cluster.crew().rendezvous([ON_N1, ON_N0], timeout_s=7.0)
    host, port = await cluster.instances[NODES[1]].store_address(ON_N1)
    assert seats == [wire.Rendezvous(rank=rank, world_size=2, host=host, port=port, timeout_s=7.0) for rank in range(2)]


async def test_each_worker_loads_a_version_from_its_own_node(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0, ON_N0_TOO, ON_N1], transition="start")
    await crew.load(snapshot(4), crew.members, reference=True)
    for grant in crew.members:
        (load,) = cluster.worker(grant).loads
        node = NodeId(grant.gpu.partition("/")[0])
        assert load.folder == await cluster.instances[node].fetch_snapshot(snapshot(4))
        assert (load.version, load.reference, list(load.files)) == (4, True, ["rank00000"])


async def test_a_snapshot_with_a_wrong_checksum_is_never_loaded(cluster: Cluster) -> None:
    crew = cluster.crew()
    await crew.start([ON_N0], transition="start")
    wrong = types_pb2.Snapshot()
    wrong.CopyFrom(snapshot(4))
    wrong.shards[0].checksum = "another file's"
    with pytest.raises(SnapshotMismatch, match="version 4 names checksum"):
        await crew.load(wrong, crew.members)
    assert cluster.worker(ON_N0).loads == []


async def test_dropping_old_versions_passes_over_a_node_that_does_not_answer(cluster: Cluster) -> None:
    cluster.instances[NODES[0]].is_silent = True
    await cluster.crew().drop_snapshots(before_version=3, keep=[0])
    assert cluster.instances[NODES[1]].drops == [(3, (0,))]


async def test_together_cancels_the_rest_at_the_first_failure_and_waits_for_their_end() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        raise ArithmeticError("first")

    with pytest.raises(ArithmeticError, match="first"):
        await together([forever(), fails(), forever()])
    assert ended == ["cancelled"] * 2
