"""The progress of an iteration's training, for the actor's progress pictures.

Invariants:
- A picture painted during an update is not at a boundary. [test_lead: pictures_show_each_update]
- An update that a death interrupts counts for no rate. [test_training_picture: interrupted_update_counts_for_no_rate]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.actor.minibatches import MinibatchAssembly
from services.actor.rates import TrainingRates
from tidegate.types import Layout
from tidegate.v1 import events_pb2


@dataclass(slots=True)
class TrainingPicture:
    """The picture of one iteration. `rates` outlive it. It calls `note_change` where an update begins or ends."""

    assembly: MinibatchAssembly
    rates: TrainingRates
    note_change: Callable[[], None] = lambda: None
    num_minibatches_done: int = 0
    is_updating: bool = False
    closes_at_ms: int | None = None
    """The expected end of the update, by the wall clock, as the store's clock. None before one was measured."""

    async def paint(self) -> events_pb2.Training:
        return events_pb2.Training(
            num_minibatches_done=self.num_minibatches_done,
            num_taken=self.assembly.num_taken,
            is_at_boundary=not self.is_updating,
            closes_at_ms=self.closes_at_ms,
            measured=self.rates.by_layout(),
            update_s=self.rates.update_s(),
        )

    @contextmanager
    def in_update(self, layout: Layout, num_tokens: int) -> Iterator[None]:
        """The context of an update of `num_tokens` response tokens."""
        expected_s = self.rates.expected_s(layout, num_tokens=num_tokens)
        self.is_updating = True
        self.closes_at_ms = None if expected_s is None else round((time.time() + expected_s) * 1000)
        self.note_change()
        started_s = asyncio.get_running_loop().time()
        try:
            yield
            seconds = asyncio.get_running_loop().time() - started_s
            self.rates.note(layout, num_tokens=num_tokens, seconds=seconds)
        finally:
            self.is_updating, self.closes_at_ms = False, None

    def end_minibatch(self) -> None:
        """Note the end of a minibatch, which was updated on or had nothing to train on."""
        self.num_minibatches_done += 1
        self.note_change()
