"""The rollout's picture of an iteration: the lead asks the engines for their load, and adds what it knows itself.

Invariant: a look at an engine neither delays nor changes anything. The picture shows an engine without an answer in
time as it was at the last look. [test_generation_picture: shown_as_last_seen]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.rollout.groups import GroupsInProgress
from services.rollout.partials import Partials
from services.rollout.progress import EngineProgress, IterationProgress
from tidegate.candidates import Candidates
from tidegate.runtime.crew import Crew
from tidegate.types import GpuId, Grant
from tidegate.v1 import events_pb2, samples_pb2
from tidegate.v1 import workers_pb2 as wire

_LOOK_S = 5.0
"""An engine answers between two of its steps: one in this process within milliseconds, a server after its present
step."""


@dataclass(frozen=True, slots=True)
class GenerationPicture:
    """`engines` returns the engines that make the iteration at the moment."""

    crew: Crew
    engines: Callable[[], Sequence[tuple[Grant, EngineProgress]]]
    groups: GroupsInProgress[samples_pb2.Sample]
    candidates: Candidates
    progress: IterationProgress
    partials: Partials = field(default_factory=Partials)

    async def paint(self) -> events_pb2.Generation:
        await asyncio.gather(*(self._look(grant, engine) for grant, engine in self.engines()))
        return self.progress.picture(
            self.candidates.prompts,
            [(GpuId(grant.gpu), engine) for grant, engine in self.engines()],
            self.groups.waiting,
            self.candidates.seen,
            self.partials.num_tokens,
        )

    async def _look(self, grant: Grant, engine: EngineProgress) -> None:
        reply = await self.crew.glance(grant, wire.WorkerCall(look=wire.Look()), timeout_s=_LOOK_S)
        if reply is not None and reply.HasField("load"):
            engine.see(reply.load, asyncio.get_running_loop().time())
