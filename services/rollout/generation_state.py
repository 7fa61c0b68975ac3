"""The rollout lead's state while engines generate: the engines, and the open iteration or evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.rollout.groups import GroupsInProgress
from services.rollout.partials import Partials
from services.rollout.progress import EngineProgress, IterationProgress
from services.rollout.seating import Demand, Room
from tidegate.types import Grant, SampleId
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire


@dataclass(slots=True)
class EngineSlot:
    """An engine on a slot. `version` is the version of its weights, None before the first load.

    `calls` are its open calls to generate. An engine that leaves collects what it hands over, so that the engines which
    continue it get it all at once: one prefill of many costs less waiting than several in a row."""

    grant: Grant
    version: int | None = None
    progress: EngineProgress = field(default_factory=EngineProgress)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    is_leaving: bool = False
    handed_over: list[SampleId] = field(default_factory=list)
    num_lost_tokens: int = 0
    """The tokens that the engine made and did not hand over."""

    @property
    def num_held(self) -> int:
        return len(self.progress.held)

    def room(self, demand: Callable[[SampleId, int], Demand], *, capacity: int) -> Room:
        """The engine's places, where it may hold `capacity` samples."""
        progress = self.progress
        held = (demand(each, progress.lengths.get(each, progress.brought.get(each, 0))) for each in progress.held)
        return Room(max(0, capacity - self.num_held), tuple(held), progress.kv_capacity_tokens)


@dataclass(slots=True)
class GenerationState:
    """The state of one iteration's or evaluation's generation.

    `request` makes the request for a sample that begins, and `max_new_tokens` bounds its response. `settle` is called
    with this state, the prompt and the responses of each complete group."""

    version: int
    groups: GroupsInProgress[samples_pb2.Sample]
    request: Callable[[SampleId], wire.GenerationRequest]
    max_new_tokens: int
    settle: Callable[[GenerationState, int, Sequence[samples_pb2.Sample]], Coroutine[Any, Any, None]]
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    """The running calls to engines, and the tasks that settle groups, which delay no engine."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0
    partials: Partials = field(default_factory=Partials)
    progress: IterationProgress | None = None
    """The progress of an iteration. None in an evaluation."""
    note_change: Callable[[], None] = lambda: None
    """Called when the set of engines has changed, so that a new picture is published."""
    tell: Callable[[samples_pb2.Sample], None] = lambda _: None
    """Called with each response that ended ahead of its group. It returns at once."""

    def to_send(self, sample: SampleId) -> wire.GenerationRequest:
        """The request for a sample, with what other engines made of its response."""
        request, partial = self.request(sample), self.partials.of(sample)
        if partial is not None:
            request.partial.CopyFrom(partial)
        return request

    def demands(self) -> Callable[[SampleId, int], Demand]:
        """What a sample needs that has so many tokens."""
        expected = self.progress.expected_tokens() if self.progress is not None else lambda _: None

        def demand(sample: SampleId, num_tokens: int) -> Demand:
            known = expected(sample.prompt)
            if known is None:
                return Demand(self.max_new_tokens - num_tokens, self.max_new_tokens)
            # Lengths have long tails: a response past its expected length is taken for about to double.
            final = min(float(self.max_new_tokens), known if num_tokens < known else 2.0 * num_tokens)
            return Demand(max(1.0, final - num_tokens), final)

        return demand
