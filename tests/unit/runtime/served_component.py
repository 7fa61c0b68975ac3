"""A leading instance's component behind real gRPC, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.component_bench import JOB, snapshot
from tests.unit.runtime.diary import BEAT_S, DiaryLead, Hosting, hosting
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.ownership.records import StoreUnavailable
from tidegate.runtime.component import ComponentServicer
from tidegate.runtime.host import ComponentHost
from tidegate.types import CommandId, JobId
from tidegate.v1 import commands_pb2, commands_pb2_grpc

COMPONENT = commands_pb2.DESCRIPTOR.services_by_name["Component"]


class HeldLog:
    """The store's log of commands. It answers a write when it may, or loses its answer."""

    def __init__(self, hosted: Hosting) -> None:
        self._hosted = hosted
        self.written = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.loses_answers = False

    async def recall(self, job: JobId, command: CommandId) -> bytes | None:
        return await self._hosted.store.recall(job, command)

    async def remember(self, job: JobId, command: CommandId, result: bytes) -> bytes:
        stored = await self._hosted.store.remember(job, command, result)
        self.written.set()
        await self.may_answer.wait()
        if self.loses_answers:
            raise StoreUnavailable("the answer is lost")
        return stored


class Served:
    """A leading instance, and a client of it."""

    def __init__(
        self, hosted: Hosting, host: ComponentHost, stub: commands_pb2_grpc.ComponentAsyncStub, log: HeldLog
    ) -> None:
        self.hosted = hosted
        self.host = host
        self.stub = stub
        self.log = log

    @property
    def lead(self) -> DiaryLead:
        return self.hosted.bench.leads[-1]

    def load(self, version: int, *, incarnation: int = 1, **header: Any) -> commands_pb2.LoadWeightsRequest:
        request = commands_pb2.LoadWeightsRequest(
            header=self.hosted.bench.header(incarnation=incarnation), weights=snapshot(version)
        )
        for name, value in header.items():
            setattr(request.header, name, value)
        return request

    async def send(self, request: commands_pb2.LoadWeightsRequest) -> commands_pb2.CommandResult:
        return (await self.stub.LoadWeights(request)).result

    async def until(self, *lines: str) -> None:
        await self.hosted.bench.changes.until(lambda: self.lead.diary[-len(lines) :] == list(lines))


@asynccontextmanager
async def served(tmp_path: Path, *, beat_s: float = BEAT_S) -> AsyncIterator[Served]:
    async with hosting(tmp_path) as hosted:
        host = hosted.start(beat_s=beat_s)
        await hosted.elected()
        log = HeldLog(hosted)
        servicer = ComponentServicer(JOB, lambda: host, log)
        service = Service(COMPONENT, lambda to: commands_pb2_grpc.add_ComponentServicer_to_server(servicer, to))
        server = await serve([service], "127.0.0.1:0")
        channels = Channels(default_timeout_s=60.0)
        try:
            yield Served(hosted, host, commands_pb2_grpc.ComponentStub(channels.connect(server.endpoint)), log)
        finally:
            await channels.close()
            await server.stop(grace_s=0)
