"""What the rollout's lead has in hand while responses are made: its engines, and the iteration or evaluation that they
make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.rollout.groups import GroupsInProgress
from services.rollout.progress import EngineProgress, IterationProgress
from tidegate.types import Grant, SampleId
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire


@dataclass(slots=True)
class EngineSlot:
    grant: Grant
    version: int | None = None
    progress: EngineProgress = field(default_factory=EngineProgress)

    @property
    def num_held(self) -> int:
        return len(self.progress.held)


@dataclass(slots=True)
class Making:
    """Responses that are being made, as it stands. `request` asks an engine for one; `settle` is for a group that is
    complete, and is given the generation, the prompt and the responses."""

    version: int
    groups: GroupsInProgress[samples_pb2.Sample]
    request: Callable[[SampleId], wire.GenerationRequest]
    settle: Callable[[Making, int, Sequence[samples_pb2.Sample]], Coroutine[Any, Any, None]]
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    """To engines; also the settling of groups, which holds up no engine."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0
    num_failed_rewards: int = 0
    progress: IterationProgress | None = None
    """Of what is trained on."""
    note_change: Callable[[], None] = lambda: None
    """Its engines are others than before."""
