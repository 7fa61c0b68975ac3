"""When a lead tells how its iteration is: pictures, apart from the work that they are of.

At the beginning, at each turn (what a decision would stand on is other than before), and at the end; between these as
often as the pace allows. A picture that says what the one before said is not told.
Invariants: one at a time, so that none overtakes a later one; the work never waits for a picture, but for the last,
which is told before the iteration is reported; an iteration that fails tells no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.runtime.cancelling import end_task
from tidegate.v1 import events_pb2

DECIDING_BYTES_PER_S = 4000.0
"""Of each component: 20 kB every 5 s, some 20 h in the 256 MiB of events that a job has by default."""
WATCHING_BYTES_PER_S = 200.0
"""The same in two weeks."""

Picture: TypeAlias = events_pb2.Generation | events_pb2.Inferring | events_pb2.Training


@dataclass(frozen=True, slots=True)
class Pace:
    """At most every `every_s`, and on average no more than `bytes_per_s`: events are kept for good, and a large job's
    picture is some 20 kB."""

    every_s: float
    bytes_per_s: float

    def pause_s(self, picture: Picture) -> float:
        return max(self.every_s, picture.ByteSize() / self.bytes_per_s)


def pace_of(scheduler: SchedulerSection) -> Pace:
    """Where nothing is decided on pictures they are for people and for predictions: few are enough."""
    decides = scheduler.policy != "static"
    return Pace(scheduler.decide_every_s, DECIDING_BYTES_PER_S if decides else WATCHING_BYTES_PER_S)


class Pictures:
    """Of one iteration. `paint` makes the present one; `tell` returns when it is on the stream."""

    def __init__(
        self, paint: Callable[[], Awaitable[Picture]], tell: Callable[[Picture], Awaitable[None]], pace: Pace
    ) -> None:
        self._paint = paint
        self._tell = tell
        self._pace = pace
        self._turned = asyncio.Event()
        self._last: bytes | None = None
        self._is_over = False

    def turn(self) -> None:
        """What a decision would stand on is other than before."""
        self._turned.set()

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """While the iteration is worked on, and once it is done."""
        telling = asyncio.create_task(self._go_on(), name="pictures")
        try:
            yield
            self._is_over = True
            self._turned.set()
            await telling
        finally:
            await end_task(telling)

    async def _go_on(self) -> None:
        while True:
            is_last = self._is_over
            self._turned.clear()
            picture = await self._show()
            if is_last:
                return
            try:
                async with asyncio.timeout(self._pace.pause_s(picture)):
                    await self._turned.wait()
            except TimeoutError:
                continue

    async def _show(self) -> Picture:
        picture = await self._paint()
        text = picture.SerializeToString(deterministic=True)
        if text != self._last:
            await self._tell(picture)
            self._last = text
        return picture
