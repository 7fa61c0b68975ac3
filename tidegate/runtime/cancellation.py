"""Cancellation that is not lost.

On Python 3.11 `asyncio.wait_for` loses a cancellation that comes together with its result. A library may also turn a
cancellation into its own error. A run that then waits for ever would not stop at Ctrl-C.
"""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.2


def raise_if_cancelled() -> None:
    """CancelledError when something has cancelled the current task, however many awaits ago."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task that has nothing to clean up. Repeats the cancellation until the task has ended."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
