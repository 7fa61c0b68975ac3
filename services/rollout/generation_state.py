"""The rollout lead's state while engines generate: the engines, and the open iteration or evaluation."""

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
    """An engine on a slot. `version` is the version of its weights, None before the first load."""

    grant: Grant
    version: int | None = None
    progress: EngineProgress = field(default_factory=EngineProgress)

    @property
    def num_held(self) -> int:
        return len(self.progress.held)


@dataclass(slots=True)
class GenerationState:
    """The state of one iteration's or evaluation's generation.

    `request` makes the request for a sample. `settle` is called with this state, the prompt and the responses of each
    complete group."""

    version: int
    groups: GroupsInProgress[samples_pb2.Sample]
    request: Callable[[SampleId], wire.GenerationRequest]
    settle: Callable[[GenerationState, int, Sequence[samples_pb2.Sample]], Coroutine[Any, Any, None]]
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    """The running calls to engines, and the tasks that settle groups, which delay no engine."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0
    progress: IterationProgress | None = None
    """The progress of an iteration. None in an evaluation."""
    note_change: Callable[[], None] = lambda: None
    """Called when the set of engines has changed, so that a new picture is published."""
