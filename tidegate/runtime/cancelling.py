"""Cancellation that arrives. On Python 3.11 `asyncio.wait_for` loses one that comes together with its result, and a
library may turn one into an error of its own; a run that waits for ever on either would not stop at Ctrl-C."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.2


def raise_if_cancelled() -> None:
    """CancelledError when the current task was told to end, however many awaits ago."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task that has nothing to clean up, until it has ended."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
