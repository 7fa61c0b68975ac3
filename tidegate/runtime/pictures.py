"""Reports how an iteration goes, as pictures. The reports run beside the work.

A lead publishes a picture at the beginning, at each change that a decision depends on, and at the end. Between these it
publishes as often as the pace allows. A picture equal to the one before is left out.

Invariants:
- Pictures are published one at a time, so that none overtakes a later one.
  [test_pictures: the_work_goes_on]
- The work never waits for a picture, except for the last one, which is published before the iteration's report.
  [test_pictures: work_goes_on_while_a_picture_waits]
- An iteration that fails publishes no more pictures. [test_pictures: work_that_fails_publishes]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.runtime.cancellation import end_task
from tidegate.v1 import events_pb2

DECIDING_BYTES_PER_S = 4000.0
"""The rate of each component: 20 kB every 5 s, which are some 350 MB a day in the job's `events.jsonl`."""
WATCHING_BYTES_PER_S = 200.0
"""The rate at which they are 17 MB a day."""

Picture: TypeAlias = events_pb2.Generation | events_pb2.Inferring | events_pb2.Training


@dataclass(frozen=True, slots=True)
class Pace:
    """At most one picture every `every_s`, and on average no more than `bytes_per_s`.

    The limit is needed because the job's folder keeps every event, and a large job's picture has some 20 kB.
    """

    every_s: float
    bytes_per_s: float

    def pause_s(self, picture: Picture) -> float:
        return max(self.every_s, picture.ByteSize() / self.bytes_per_s)


def pace_of(scheduler: SchedulerSection) -> Pace:
    """Where no policy decides on pictures, they are only for people and for predictions: few are enough."""
    decides = scheduler.policy != "static"
    return Pace(scheduler.decide_every_s, DECIDING_BYTES_PER_S if decides else WATCHING_BYTES_PER_S)


class Pictures:
    """The pictures of one iteration. `paint` makes the present one. `publish` returns when it is on the stream."""

    def __init__(
        self, paint: Callable[[], Awaitable[Picture]], publish: Callable[[Picture], Awaitable[None]], pace: Pace
    ) -> None:
        self._paint = paint
        self._publish = publish
        self._pace = pace
        self._has_changed = asyncio.Event()
        self._last: bytes | None = None
        self._is_over = False

    def note_change(self) -> None:
        """Something has changed that a decision depends on."""
        self._has_changed.set()

    @asynccontextmanager
    async def updates(self) -> AsyncIterator[None]:
        """Publishes pictures while the block works on the iteration, and one once it is done."""
        publishing = asyncio.create_task(self._go_on(), name="pictures")
        try:
            yield
            self._is_over = True
            self._has_changed.set()
            await publishing
        finally:
            await end_task(publishing)

    async def _go_on(self) -> None:
        while True:
            is_last = self._is_over
            self._has_changed.clear()
            picture = await self._show()
            if is_last:
                return
            try:
                async with asyncio.timeout(self._pace.pause_s(picture)):
                    await self._has_changed.wait()
            except TimeoutError:
                continue

    async def _show(self) -> Picture:
        picture = await self._paint()
        text = picture.SerializeToString(deterministic=True)
        if text != self._last:
            await self._publish(picture)
            self._last = text
        return picture
