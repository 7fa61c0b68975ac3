"""The leads of a job in one process, which answer the scheduler over real NATS, Redis and gRPC, and time its commands.

They do no work: each command is answered by the event of its effect, at once or after a time. A component reports an
iteration as soon as all components have opened it, and the actor publishes the next version as soon as all have closed
it. So each of these events is the last one that a command waits for:

    event (the last of its kind)   command
    WeightsPublished               LoadWeights
    WeightsLoaded                  OpenIteration
    IterationReported              CloseIteration
    ResizeRequested                ScaleDown or ScaleUp of the actor, after the transition's steps in the store

The time of a command runs from just before its event is published to the arrival of the call at the lead.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.adapters.nats_bus import NatsBus
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder
from tidegate.checksums import combined_checksum
from tidegate.codec import decode_grants, decode_layout, encode_layout, fate_of
from tidegate.config.job_config import JobConfig
from tidegate.events import EventBody, EventSource
from tidegate.ports.store import Store
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.host import attach_when_adopted
from tidegate.runtime.service import connect_bus, connect_store
from tidegate.types import GpuId, Grant, JobId, Layout, NodeId, Role, SampleId, instance_id
from tidegate.v1 import commands_pb2, commands_pb2_grpc, events_pb2, types_pb2

NODE = NodeId("n0")
_LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Timed:
    """The milliseconds from an event to one of its commands."""

    command: str
    took_ms: float


class Lead(commands_pb2_grpc.ComponentServicer):
    """Takes the commands of one role."""

    def __init__(self, role: Role, cluster: Leads) -> None:
        self._role = role
        self._cluster = cluster

    async def ScaleUp(self, request: Any, context: Any) -> commands_pb2.ScaleUpResponse:
        self._cluster.took(self._role, "ScaleUp", self._cluster.scaled_up(self._role, request))
        return commands_pb2.ScaleUpResponse(result=_ACCEPTED)

    async def ScaleDown(self, request: Any, context: Any) -> commands_pb2.ScaleDownResponse:
        self._cluster.took(self._role, "ScaleDown", self._cluster.scaled_down(self._role, request))
        return commands_pb2.ScaleDownResponse(result=_ACCEPTED)

    async def LoadWeights(self, request: Any, context: Any) -> commands_pb2.LoadWeightsResponse:
        self._cluster.took(self._role, "LoadWeights", self._cluster.loaded(self._role, request))
        return commands_pb2.LoadWeightsResponse(result=_ACCEPTED)

    async def OpenIteration(self, request: Any, context: Any) -> commands_pb2.OpenIterationResponse:
        self._cluster.took(self._role, "OpenIteration", self._cluster.opened(self._role, request))
        return commands_pb2.OpenIterationResponse(result=_ACCEPTED)

    async def CloseIteration(self, request: Any, context: Any) -> commands_pb2.CloseIterationResponse:
        self._cluster.took(self._role, "CloseIteration", self._cluster.closed(self._role, request))
        return commands_pb2.CloseIterationResponse(result=_ACCEPTED)


_ACCEPTED = commands_pb2.CommandResult(accepted=True)


@dataclass
class Leads:
    """All leads of the job. `timed` has the commands since the last `clear`."""

    config: JobConfig
    bus: NatsBus
    store: Store
    timed: list[Timed] = field(default_factory=list)
    works_s: float = 0.0
    """The mean time from a command to its answer. Each is drawn from half of it to one and a half."""
    num_closed: int = 0
    holds: bool = False
    """Whether the open iteration stays open: nothing is reported."""
    incarnation: int = 1
    _announcers: dict[str, Announcer] = field(default_factory=dict)
    _caused_ns: dict[str, int] = field(default_factory=dict)
    _members: dict[Role, tuple[Grant, ...]] = field(default_factory=dict)
    _opened: set[Role] = field(default_factory=set)
    _loaded: set[Role] = field(default_factory=set)
    _closed: set[Role] = field(default_factory=set)
    _plan: types_pb2.IterationPlan | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    failure: BaseException | None = None

    @property
    def job(self) -> JobId:
        return JobId(self.config.job)

    @property
    def is_open(self) -> bool:
        """Whether all leads have opened the iteration, and none has reported it."""
        return len(self._opened) == len(Role)

    async def until(self, holds: Any) -> None:
        """Waits until it holds after some command. The first failure of an answer is raised here."""
        async with self._changed:
            while not holds():
                if self.failure is not None:
                    raise self.failure
                await self._changed.wait()

    def took(self, role: Role, command: str, answer: Coroutine[Any, Any, None]) -> None:
        """Times the command and answers it beside its call."""
        caused_ns = self._caused_ns.get(command)
        if caused_ns is not None:
            self.timed.append(Timed(command, (time.perf_counter_ns() - caused_ns) / 1e6))
        task = asyncio.create_task(self._answered(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def begin(self, endpoints: dict[Role, str]) -> None:
        for role, endpoint in endpoints.items():
            name = instance_id(role, NODE)
            await self._say(role, events_pb2.InstanceJoined(instance=name, endpoint=endpoint, boot=1), incarnation=0)
            await self._say(role, events_pb2.LeadElected(instance=name, endpoint=endpoint, epoch=1), incarnation=0)
        submitted = events_pb2.JobSubmitted(config_json=self.config.to_json())
        await self._announcer("launcher", None).publish(submitted, incarnation=1)

    async def resize(self, gpus: tuple[GpuId, ...]) -> None:
        """A person moves the actor to these GPUs. Returns once the transition has ended."""
        requested = events_pb2.ResizeRequested(layout=encode_layout(Layout(dp=len(gpus))), gpus=gpus)
        self._cause("ScaleUp", "ScaleDown")
        await self._announcer("person", None).publish(requested, incarnation=self.incarnation)
        await self.until(lambda: [grant.gpu for grant in self._members[Role.ACTOR]] == list(gpus))
        while await self.store.current_transitions(self.job):  # noqa: ASYNC110 - the store tells nobody of a change
            await asyncio.sleep(_LOOK_EVERY_S)
        for command in ("ScaleUp", "ScaleDown"):
            self._caused_ns.pop(command, None)

    async def aclose(self) -> None:
        for task in self._tasks:
            await end_task(task)

    async def scaled_up(self, role: Role, request: commands_pb2.ScaleUpRequest) -> None:
        is_start = role not in self._members
        if not is_start:
            await self._commit(request.header.transition_id, request.layout)
        await self._committed(role, request.layout, request.members, request.header.transition_id)
        if role is Role.ACTOR and is_start:
            await self._publish_version(0)

    async def scaled_down(self, role: Role, request: commands_pb2.ScaleDownRequest) -> None:
        transition = request.header.transition_id
        if request.members:
            await self._commit(transition, request.layout)
            await self._committed(role, request.layout, request.members, transition)
        released = events_pb2.GpusReleased(grants=request.grants)
        await self._say(role, released, transition_id=transition, grants=decode_grants(request.grants))

    async def loaded(self, role: Role, request: commands_pb2.LoadWeightsRequest) -> None:
        self._loaded.add(role)
        if self._loaded == {Role.ROLLOUT, Role.INFERENCE}:
            self._loaded.clear()
            self._cause("OpenIteration")
        weights = request.weights
        await self._say(role, events_pb2.WeightsLoaded(version=weights.version, checksum=weights.checksum))

    async def opened(self, role: Role, request: commands_pb2.OpenIterationRequest) -> None:
        self._plan = request.plan
        self._opened.add(role)
        if self.is_open and not self.holds:
            await self.report()

    async def report(self) -> None:
        """All components report the open iteration."""
        plan = self._plan
        assert plan is not None
        self._opened.clear()
        ids = [
            SampleId(self.incarnation, plan.iteration, plan.first_prompt + prompt, draw)
            for prompt in range(plan.num_prompts)
            for draw in range(plan.group_size)
        ]
        for role in Role:
            # The last account closes the iteration.
            self._cause("CloseIteration")
            report = events_pb2.IterationReported(
                generated=fate_of(ids) if role is Role.ROLLOUT else None,
                trained=fate_of(ids) if role is Role.ACTOR else None,
            )
            await self._say(role, report, iteration=plan.iteration)

    async def closed(self, role: Role, request: commands_pb2.CloseIterationRequest) -> None:
        self._closed.add(role)
        if len(self._closed) == len(Role):
            self._closed.clear()
            self.num_closed += 1
            await self._publish_version(request.iteration + 1)

    async def _publish_version(self, version: int) -> None:
        shard = types_pb2.SnapshotShard(node=NODE, endpoint="none", file="rank00000", checksum=f"sum-{version}")
        snapshot = types_pb2.Snapshot(
            job=self.job,
            incarnation=self.incarnation,
            version=version,
            shards=[shard],
            checksum=combined_checksum({shard.file: shard.checksum}),
        )
        self._cause("LoadWeights")
        await self._say(Role.ACTOR, events_pb2.WeightsPublished(snapshot=snapshot), iteration=max(0, version - 1))

    async def _committed(self, role: Role, layout: types_pb2.Layout, members: Any, transition: str) -> None:
        self._members[role] = decode_grants(members)
        await self._say(role, events_pb2.LayoutCommitted(layout=layout, grants=members), transition_id=transition)

    async def _commit(self, transition: str, layout: types_pb2.Layout) -> None:
        """The actor's lead decides by the commit of its part in the store."""
        (planned,) = [each for each in await self.store.current_transitions(self.job) if each.id == transition]
        await self.store.commit(planned, Role.ACTOR, decode_layout(layout))

    def _cause(self, *commands: str) -> None:
        """What these commands wait for happens now."""
        self._caused_ns |= dict.fromkeys(commands, time.perf_counter_ns())

    async def _say(self, role: Role, body: EventBody, **fields: Any) -> None:
        headers: dict[str, Any] = {"incarnation": self.incarnation, "grants": self._members.get(role, ()), **fields}
        await self._announcer(instance_id(role, NODE), role).publish(body, **headers)

    def _announcer(self, source: str, role: Role | None) -> Announcer:
        if source not in self._announcers:
            made = EventSource(source, role=role, boot=1, now_ns=time.time_ns)
            self._announcers[source] = Announcer(self.bus.events, made, self.job)
        return self._announcers[source]

    async def _answered(self, answer: Coroutine[Any, Any, None]) -> None:
        try:
            if self.works_s:
                await asyncio.sleep(self.works_s * self._random.uniform(0.5, 1.5))
            await answer
        except Exception as error:  # noqa: BLE001 - whoever waits in `until` raises it
            self.failure = error
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def leads(config: JobConfig, *, works_s: float) -> AsyncIterator[Leads]:
    """Leads that serve and have submitted the job, once a scheduler has adopted the store."""
    bus = await connect_bus(config, name="leads")
    store = connect_store(config)
    await attach_when_adopted(store)
    made = Leads(config, bus, store, works_s=works_s)
    commands = commands_pb2.DESCRIPTOR.services_by_name["Component"]
    tls = Credentials(credential_folder(Path(config.runtime.host_memory_root), Party.JOB))
    servers = {}
    for role in Role:
        lead = Lead(role, made)  # type: ignore[abstract]  # this job has no other commands
        add_to = functools.partial(commands_pb2_grpc.add_ComponentServicer_to_server, lead)
        servers[role] = await serve([Service(commands, add_to)], "127.0.0.1:0", tls=tls)
    try:
        await made.begin({role: server.endpoint for role, server in servers.items()})
        yield made
    finally:
        await made.aclose()
        for server in servers.values():
            await server.stop(grace_s=0.0)
        await store.aclose()
        await bus.close()
