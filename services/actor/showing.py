"""Where an iteration's training is, as the actor's pictures tell it.

Invariants: while all ranks are at an update it is not at a boundary; an update that a death broke off counts for no
rate.
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
class Showing:
    """Of one iteration; `rates` outlive it. `turn` is called where an update begins, and where one ends."""

    assembly: MinibatchAssembly
    rates: TrainingRates
    turn: Callable[[], None] = lambda: None
    num_minibatches_done: int = 0
    is_updating: bool = False
    closes_at_ms: int | None = None
    """Where updates in the layout were measured: by the wall clock, which the store's is."""

    async def paint(self) -> events_pb2.Training:
        return events_pb2.Training(
            num_minibatches_done=self.num_minibatches_done,
            num_taken=self.assembly.num_given,
            is_at_boundary=not self.is_updating,
            closes_at_ms=self.closes_at_ms,
            measured=self.rates.told(),
            update_s=self.rates.update_s(),
        )

    @contextmanager
    def updating(self, layout: Layout, num_tokens: int) -> Iterator[None]:
        """While the ranks are at an update of so many response tokens."""
        expected_s = self.rates.expected_s(layout, num_tokens=num_tokens)
        self.is_updating = True
        self.closes_at_ms = None if expected_s is None else round((time.time() + expected_s) * 1000)
        self.turn()
        started_s = asyncio.get_running_loop().time()
        try:
            yield
            seconds = asyncio.get_running_loop().time() - started_s
            self.rates.note(layout, num_tokens=num_tokens, seconds=seconds)
        finally:
            self.is_updating, self.closes_at_ms = False, None

    def end_minibatch(self) -> None:
        """Updated, or without anything to train on."""
        self.num_minibatches_done += 1
        self.turn()
