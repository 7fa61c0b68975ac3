"""Requests to all ranks of the actor's layout: one at a time, and repeated when a rank dies during one.

A request waits until every rank of the layout is present. A death leaves the layout one rank short until a resize
brings the rank back. The living ranks may have served a request before it is repeated, so a repeat must have the same
result.

A request may leave something uncommitted on the ranks, such as gradients. `num_interruptions` tells whether all of it
is still there: it grows when a rank dies in a request, and when someone had the ranks `alone` and lost it. So a request
can reserve the ranks for the next one: until then nobody else gets them, but for a change that a death needs, or one
that carries what is uncommitted. Otherwise who wants them `alone` comes before the next request.

Invariants:
- At most one request or one resize is at work at a time. [test_two_phase_resize: changes_between_two_updates]
- Nobody gets reserved ranks for himself alone while all of them live, unless he carries what is uncommitted.
  [test_all_ranks: reserved_ranks_wait] [test_all_ranks: change_that_carries]
- A change that waits comes before the next request that was not reserved for. [test_all_ranks: comes_before_the_next]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from tidegate.runtime.crew import Crew, WorkerGone, WorkerRefused, WorkerUnreachable
from tidegate.types import Layout
from tidegate.v1 import workers_pb2 as wire

Result = TypeVar("Result")

LAST_WORDS_S = 2.0
"""A death shows at the worker's own instance within this time after its peers lost it."""


@dataclass(slots=True, eq=False)
class Change:
    """What someone does with the ranks alone, or waits to do.

    layout: the layout that it brings about, if it is another one.
    carries: whether it can carry what is uncommitted. Then no reservation keeps it waiting.
    interrupts: whether what was uncommitted is lost.
    """

    layout: Layout | None
    carries: bool
    interrupts: bool


class AllRanks:
    """The ranks are the crew's members; see the module."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.layout = Layout()
        """The layout in force."""
        self._is_busy = False
        self._waiting: list[Change] = []
        """In order."""
        self._at_work: Change | None = None
        self._reserved_at: int | None = None
        """`num_interruptions` at the request that reserved the ranks."""
        self._freed = asyncio.Event()
        self._switched = asyncio.Event()
        """The next committed resize sets it."""
        self.num_interruptions = 0
        self.note_interruption: Callable[[], None] = lambda: None
        """Called when an interruption is over."""
        self._log = structlog.get_logger("all_ranks")

    @property
    def are_present(self) -> bool:
        return len(self._crew.members) == self.layout.num_ranks

    @property
    def are_carrying(self) -> bool:
        """Whether a change that carries what is uncommitted is at work, or waits."""
        return any(change.carries for change in (*self._waiting, *([self._at_work] if self._at_work else [])))

    @property
    def wanted(self) -> Layout | None:
        """The layout of the next change that waits for the ranks and has one."""
        return next((change.layout for change in self._waiting if change.layout is not None), None)

    @asynccontextmanager
    async def alone(
        self, *, to: Layout | None = None, changes_ranks: bool = True, carries: bool = False
    ) -> AsyncIterator[Change]:
        """Send the ranks no other request within this context. If it `changes_ranks`, it is an interruption at its end,
        unless it says that it was none."""
        change = Change(to, carries, interrupts=changes_ranks)
        self._waiting.append(change)
        try:
            while self._is_busy or (self._are_reserved and not carries):
                await self._freed.wait()
            self._is_busy, self._at_work = True, change
        finally:
            self._waiting.remove(change)
            self._look_again()
            if self._at_work is not change:
                # Who left the ranks to this change goes on.
                self.note_interruption()
        try:
            yield change
        finally:
            self.num_interruptions += change.interrupts
            self._is_busy, self._at_work = False, None
            self._look_again()
            self.note_interruption()

    def end_reservation(self) -> None:
        self._reserved_at = None
        self._look_again()

    def switch(self, layout: Layout) -> None:
        """Record that a resize to this layout is in force."""
        self.layout = layout
        self._switched.set()
        self._switched = asyncio.Event()

    async def do(self, what: str, ask: Callable[[], Awaitable[Result]], *, reserves: bool = False) -> Result:
        """The result of `ask`, repeated after each death until it succeeds. If it `reserves` the ranks, they are for
        the next request then, or until `end_reservation`.

        Raises WorkerUnreachable. Raises a rank's WorkerRefused, or a WorkerGone, where all ranks live."""
        while True:
            async with self._requesting():
                switched = self._switched
                if self.are_present:
                    try:
                        result = await ask()
                    except WorkerUnreachable:
                        raise
                    except (WorkerGone, WorkerRefused) as error:
                        self.num_interruptions += 1
                        await self._crew.forget_dead()
                        if self.are_present:
                            raise
                        self._log.warning("broken off", what=what, error=str(error))
                    else:
                        self._reserved_at = self.num_interruptions if reserves else None
                        return result
            await switched.wait()

    @asynccontextmanager
    async def _requesting(self) -> AsyncIterator[None]:
        while self._is_busy or self.are_carrying or (self._waiting and not self._are_reserved):
            if not self._is_busy:
                # A death may have ended a reservation that the others wait for.
                self._look_again()
            await self._freed.wait()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self._look_again()

    @property
    def _are_reserved(self) -> bool:
        """A death ends a reservation: what was uncommitted is lost, and only a change brings the rank back."""
        return self._reserved_at == self.num_interruptions and self.are_present

    def _look_again(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    async def ask(self, call: wire.WorkerCall) -> list[wire.WorkerReply]:
        """The replies of all ranks to one call, in rank order. Raises as Crew.ask_interdependent."""
        return await self._crew.ask_interdependent(dict.fromkeys(self._crew.members, call), last_words_s=LAST_WORDS_S)
