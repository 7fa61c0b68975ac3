"""The rollout's pictures of an iteration: its engines are looked at, what the lead knows is told.

Invariant: looking holds up nothing and changes nothing: an engine that gives no answer in time is shown as it was last
seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.rollout.groups import GroupsInProgress
from services.rollout.progress import EngineProgress, IterationProgress
from tidegate.candidates import Candidates
from tidegate.runtime.crew import Crew
from tidegate.types import GpuId, Grant
from tidegate.v1 import events_pb2, samples_pb2
from tidegate.v1 import workers_pb2 as wire

_LOOK_S = 5.0
"""An engine answers between two steps, within milliseconds; a server, within one of its own."""


@dataclass(frozen=True, slots=True)
class Showing:
    """`engines` gives those that make the iteration, as they are now."""

    crew: Crew
    engines: Callable[[], Sequence[tuple[Grant, EngineProgress]]]
    groups: GroupsInProgress[samples_pb2.Sample]
    candidates: Candidates
    progress: IterationProgress

    async def paint(self) -> events_pb2.Generation:
        await asyncio.gather(*(self._look(grant, engine) for grant, engine in self.engines()))
        return self.progress.picture(
            self.candidates.prompts,
            [(GpuId(grant.gpu), engine) for grant, engine in self.engines()],
            self.groups.waiting,
            self.candidates.seen,
        )

    async def _look(self, grant: Grant, engine: EngineProgress) -> None:
        reply = await self.crew.glance(grant, wire.WorkerCall(look=wire.Look()), timeout_s=_LOOK_S)
        if reply is not None and reply.HasField("load"):
            engine.see(reply.load, asyncio.get_running_loop().time())
