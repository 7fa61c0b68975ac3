"""A sample stream on which a test holds up one group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from tests.component_bench import Changes
from tidegate.ports.bus import SampleConsumer, SampleStream, Stage
from tidegate.types import JobId
from tidegate.v1 import samples_pb2


class HeldPublishing:
    """The sample stream. It delays the publishing of one prompt's group until `let_go`."""

    def __init__(self, samples: SampleStream, changes: Changes, *, prompt: int) -> None:
        self.let_go = asyncio.Event()
        self.is_holding = False
        self.group: samples_pb2.SampleGroup | None = None
        self._samples = samples
        self._changes = changes
        self._prompt = prompt

    async def publish(self, stage: Stage, group: samples_pb2.SampleGroup) -> bool:
        if group.prompt == self._prompt:
            self.is_holding, self.group = True, group
            self._changes.notify()
            await self.let_go.wait()
        return await self._samples.publish(stage, group)

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: Any) -> SampleConsumer:
        return await self._samples.consumer(job, stage, name, on_dead_letter=on_dead_letter)

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        return await self._samples.published(job, stage, incarnation=incarnation, iteration=iteration)

    async def stored_group(self, job: JobId, stage: Stage, **place: int) -> samples_pb2.SampleGroup | None:
        return await self._samples.stored_group(job, stage, **place)

    async def tell_response(self, response: samples_pb2.SampleGroup) -> None:
        await self._samples.tell_response(response)

    def responses(self, job: JobId) -> AbstractAsyncContextManager[AsyncIterator[samples_pb2.SampleGroup]]:
        return self._samples.responses(job)

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        await self._samples.purge(job, incarnation=incarnation, iteration=iteration)
