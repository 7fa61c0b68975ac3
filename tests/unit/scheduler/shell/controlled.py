"""A job's Control API over real gRPC, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.scheduler.policy.static import StaticPolicy
from services.scheduler.shell.control import ControlServicer
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Component, Lead, Working
from services.scheduler.state.course import Evaluation, Summary
from services.scheduler.state.values import Fate, Placed, Snapshot
from tests.component_bench import JOB, PATIENCE_S
from tests.unit.scheduler.wire_cluster import WireCluster, wire_cluster
from tests.watched_samples import generated_group
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.job import load_job
from tidegate.ports.bus import Stage
from tidegate.types import GpuId, Grant, InstanceId, Layout, Role, Token
from tidegate.v1 import control_pb2, control_pb2_grpc

CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
LED = Component(
    lead=Lead(InstanceId("actor@n0"), "at-n0", 3, 1),
    state=Working((Grant(GpuId("n0/0"), Token(1, 2)),), Placed((GpuId("n0/0"),), Layout(dp=1))),
)
FATE = Fate(num_samples=8, ids_digest=5)
STATE = ClusterState(
    job=JOB,
    incarnation=2,
    phase=Phase.RUNNING,
    next_iteration=1,
    components={**{role: Component() for role in Role}, Role.ACTOR: LED},
    snapshots={1: Snapshot(2, 1, "files-1", "sum-1", b"")},
    summaries=(
        Summary(0, 1, 0, FATE, Fate(), (), (), (), is_superseded=True),
        Summary(0, 2, 0, FATE, replace(FATE, num_samples=6), (Fate("zero_std", 2, 0),), (), (("reward_mean", 0.5),)),
    ),
    evaluations=(Evaluation(1, 2, 8, 2, (("exact_match/pass@2", 0.5),)),),
)


class Controlled:
    """A job's Control API, and a client of it."""

    def __init__(self, cluster: WireCluster, stub: control_pb2_grpc.ControlAsyncStub, logs: Path) -> None:
        self.cluster = cluster
        self.stub = stub
        self.logs = logs
        self.state: ClusterState | None = STATE
        self.waits_s: list[float] = []
        self.change: Callable[[], None] = lambda: None
        """What happens while somebody waits for a change."""

    async def changed(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)
        self.change()

    async def bodies(self) -> list[str]:
        return [event.WhichOneof("body") or "" async for _, event in self.cluster.bus.events.read(JOB)]

    async def bury(self, prompt: int) -> int:
        """Publish a dead letter of that prompt's group, and return its id."""

        async def ignore(letter: object) -> None:
            pass

        samples = self.cluster.bus.samples
        await samples.publish(Stage.GENERATED, generated_group(prompt))
        consumer = await samples.consumer(JOB, Stage.GENERATED, "inference", on_dead_letter=ignore)
        (delivery,) = await consumer.fetch(1, timeout_s=PATIENCE_S)
        await delivery.dead_letter(f"prompt {prompt} is odd")
        return (await self.cluster.bus.dead_letters.list(JOB))[-1].id


@asynccontextmanager
async def controlled(tmp_path: Path) -> AsyncIterator[Controlled]:
    async with wire_cluster(tmp_path) as cluster:
        logs = tmp_path / "logs"
        logs.mkdir()
        channels = Channels(default_timeout_s=PATIENCE_S)
        held: list[Controlled] = []
        servicer = ControlServicer(
            JOB,
            state=lambda: held[0].state,
            reason=lambda: "static: nothing to do",
            changed=lambda timeout_s: held[0].changed(timeout_s),
            gpus=await cluster.client(),
            log=cluster.bus.events,
            dead_letters=cluster.bus.dead_letters,
            announcer=cluster.announcer("control"),
            logs=logs,
            layout_fault=partial(load_job(cluster.config).layout_fault, Role.ACTOR),
            policy=StaticPolicy(),
        )
        service = Service(CONTROL, lambda to: control_pb2_grpc.add_ControlServicer_to_server(servicer, to))
        server = await serve([service], "127.0.0.1:0")
        held.append(Controlled(cluster, control_pb2_grpc.ControlStub(channels.connect(server.endpoint)), logs))
        try:
            yield held[0]
        finally:
            await channels.close()
            await server.stop(grace_s=0)
