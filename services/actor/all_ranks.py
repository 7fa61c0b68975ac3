"""Requests to all ranks of the actor's layout: one at a time, and repeated when a rank dies during one.

A request waits until every rank of the layout is present. A death leaves the layout one rank short until a resize
brings the rank back. The living ranks may have served a request before it is repeated, so a repeat must have the same
result.

A request may leave something uncommitted on the ranks, such as gradients. `num_interruptions` tells whether all of it
is still there: it grows when a rank dies in a request, and when the ranks are someone's `alone`.

Invariant: at most one request or one resize is at work at a time. [test_two_phase_resize: changes_between_two_updates]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from tidegate.runtime.crew import Crew, WorkerGone, WorkerRefused, WorkerUnreachable
from tidegate.types import Layout
from tidegate.v1 import workers_pb2 as wire

Result = TypeVar("Result")

LAST_WORDS_S = 2.0
"""A death shows at the worker's own instance within this time after its peers lost it."""


class AllRanks:
    """The ranks are the crew's members; see the module."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.layout = Layout()
        """The layout in force."""
        self._asking = asyncio.Lock()
        self._switched = asyncio.Event()
        """The next committed resize sets it."""
        self.num_interruptions = 0
        self.note_interruption: Callable[[], None] = lambda: None
        """Called when an interruption is over."""
        self._log = structlog.get_logger("all_ranks")

    @property
    def are_present(self) -> bool:
        return len(self._crew.members) == self.layout.num_ranks

    @asynccontextmanager
    async def alone(self, *, changes_ranks: bool = True) -> AsyncIterator[None]:
        """Send the ranks no other request within this context. If it `changes_ranks`, it is an interruption."""
        async with self._asking:
            self.num_interruptions += changes_ranks
            try:
                yield
            finally:
                self.note_interruption()

    def switch(self, layout: Layout) -> None:
        """Record that a resize to this layout is in force."""
        self.layout = layout
        self._switched.set()
        self._switched = asyncio.Event()

    async def do(self, what: str, ask: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `ask`, repeated after each death until it succeeds.

        Raises WorkerUnreachable. Raises a rank's WorkerRefused, or a WorkerGone, where all ranks live."""
        while True:
            async with self._asking:
                switched = self._switched
                if self.are_present:
                    try:
                        return await ask()
                    except WorkerUnreachable:
                        raise
                    except (WorkerGone, WorkerRefused) as error:
                        self.num_interruptions += 1
                        await self._crew.forget_dead()
                        if self.are_present:
                            raise
                        self._log.warning("broken off", what=what, error=str(error))
            await switched.wait()

    async def ask(self, call: wire.WorkerCall) -> list[wire.WorkerReply]:
        """The replies of all ranks to one call, in rank order. Raises as Crew.ask_interdependent."""
        return await self._crew.ask_interdependent(dict.fromkeys(self._crew.members, call), last_words_s=LAST_WORDS_S)
