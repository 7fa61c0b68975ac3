"""The progress of an iteration's training, for the actor's progress pictures.

Invariants:
- A picture is at a boundary exactly where no portion of the open minibatch is under way or trained.
  [test_lead: pictures_show_each_update] [test_streaming: picture_is_at_a_boundary]
- A portion that a death interrupts counts for no rate. [test_training_picture: interrupted_portion_counts_for_no_rate]
- Time in which a minibatch waits for groups counts for no rate. [test_training_picture: waits_for_groups]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.actor.minibatches import MinibatchAssembly
from services.actor.rates import TrainingRates, load_of
from tidegate.types import Layout
from tidegate.v1 import events_pb2

EARLY = 0.9
"""The share of its expected time after which an update is said to end. Measured updates end up to a tenth sooner than
expected. GPUs that come late miss the boundary, and the whole next minibatch; early ones wait for a moment."""


@dataclass(slots=True)
class TrainingPicture:
    """The picture of one iteration. `rates` outlive it. It calls `note_change` where a minibatch begins, gets its last
    portion, ends or is dropped."""

    assembly: MinibatchAssembly
    rates: TrainingRates
    note_change: Callable[[], None] = lambda: None
    num_minibatches_done: int = 0
    is_begun: bool = False
    """Whether a portion of the open minibatch is under way or trained."""
    closes_at_ms: int | None = None
    """The earliest likely end of the update, by the wall clock, as the store's clock. None before a portion was
    measured, and before the last portion."""
    now_s: Callable[[], float] = time.monotonic
    """The clock of durations."""

    async def paint(self) -> events_pb2.Training:
        return events_pb2.Training(
            num_minibatches_done=self.num_minibatches_done,
            num_taken=self.assembly.num_taken,
            is_at_boundary=not self.is_begun,
            closes_at_ms=self.closes_at_ms,
            measured=self.rates.by_layout(),
            update_s=self.rates.update_s(),
        )

    @contextmanager
    def in_portion(self, layout: Layout, *, num_tokens: int, lengths: Sequence[int], is_last: bool) -> Iterator[None]:
        """The context of a portion of `num_tokens` response tokens. The last one makes the update. `lengths`: the
        tokens of each of its sequences, prompts included.

        If it raises, the minibatch is dropped."""
        if is_last or not self.is_begun:
            self.note_change()
        self.is_begun = True
        if is_last and (expected_s := self.rates.expected_s(layout, lengths)) is not None:
            self.closes_at_ms = round((time.time() + EARLY * expected_s) * 1000)
        started_s = self.now_s()
        try:
            yield
        except BaseException:
            self.drop()
            raise
        seconds, load = self.now_s() - started_s, load_of(lengths, layout)
        self.rates.note(layout, num_tokens=num_tokens, load=load, seconds=seconds, is_last=is_last)
        if is_last:
            self._reset()

    def drop(self) -> None:
        """Note that the portions so far are lost."""
        self._reset()
        self.note_change()

    def end_minibatch(self) -> None:
        """Note the end of a minibatch, which was updated on or had nothing to train on."""
        self.num_minibatches_done += 1
        self.note_change()

    def _reset(self) -> None:
        self.is_begun, self.closes_at_ms = False, None
