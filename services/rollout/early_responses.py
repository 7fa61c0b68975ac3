"""Tells the inference of responses that ended ahead of their groups, so that it scores them while others are generated.

The group on the stream is what counts, so a response that is not told costs only time. The rollout therefore never
waits for the bus, and no error of the bus reaches it.

Invariants:
- Each response but the last of its group is told. [test_early_responses: each_response_but_the_last]
- Nothing is told in reproducible mode, or of an evaluation. [test_early_responses: in_reproducible_mode_nothing]
  [test_early_responses: evaluation_tells_nothing]
- A bus without a connection, or that does not answer, delays nothing. [test_early_responses: delays_nothing]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from tidegate.ports.bus import SampleStream
from tidegate.runtime.cancellation import end_task
from tidegate.v1 import samples_pb2

Tell = Callable[[samples_pb2.SampleGroup], None]
"""Told of a group with one response. It returns at once."""


@asynccontextmanager
async def early_responses(samples: SampleStream) -> AsyncIterator[Tell]:
    """Tells responses within the block, one after another. Those that still wait at its end are given up."""
    waiting: asyncio.Queue[samples_pb2.SampleGroup] = asyncio.Queue()
    telling = asyncio.create_task(_tell_all(samples, waiting), name="tell responses")
    try:
        yield waiting.put_nowait
    finally:
        await end_task(telling)


async def _tell_all(samples: SampleStream, waiting: asyncio.Queue[samples_pb2.SampleGroup]) -> None:
    has_failed = False
    while True:
        response = await waiting.get()
        try:
            await samples.tell_response(response)
        except OSError as error:
            if not has_failed:
                structlog.get_logger("early_responses").warning("responses are not told", error=str(error))
            has_failed = True
