"""What all ranks of the actor's layout do together, one thing at a time, and again when one of them died of it.

Who asks waits until every rank of the layout is there: a death leaves the layout without one until a resize is in force
that brings it back. What is asked may have been done before by the ranks that live, and must come to the same when it
is done again. Invariant: while something is asked, or a resize is at work, nothing else is.
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
"""Within which a death shows at the instance that has the worker, after others lost it as their peer."""


class AllRanks:
    """See the module. The ranks are the crew's members."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.layout = Layout()
        """In force."""
        self._asking = asyncio.Lock()
        self._switched = asyncio.Event()
        """Set by the next resize that is in force."""
        self._log = structlog.get_logger("all_ranks")

    @property
    def are_there(self) -> bool:
        return len(self._crew.members) == self.layout.num_ranks

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nothing else is asked of the ranks meanwhile."""
        async with self._asking:
            yield

    def switch(self, layout: Layout) -> None:
        """A resize to this layout is in force."""
        self.layout = layout
        self._switched.set()
        self._switched = asyncio.Event()

    async def do(self, what: str, ask: Callable[[], Awaitable[Result]]) -> Result:
        """What comes of it. Raises WorkerUnreachable, and what a rank does that refuses though all of them live."""
        while True:
            async with self._asking:
                switched = self._switched
                if self.are_there:
                    try:
                        return await ask()
                    except WorkerUnreachable:
                        raise
                    except (WorkerGone, WorkerRefused) as error:
                        await self._crew.forget_dead()
                        if self.are_there:
                            raise
                        self._log.warning("broken off", what=what, error=str(error))
            await switched.wait()

    async def ask(self, call: wire.WorkerCall) -> list[wire.WorkerReply]:
        """Each one's reply to the same call, in rank order. Raises as Crew.ask_bound."""
        return await self._crew.ask_bound(dict.fromkeys(self._crew.members, call), last_words_s=LAST_WORDS_S)
