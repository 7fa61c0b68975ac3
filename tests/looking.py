"""Waits for what has no event in this process, such as the end of another one, by looking again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0
LOOK_AGAIN_S = 0.02


async def until(holds: Callable[[], bool]) -> None:
    """TimeoutError where it does not hold in time."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(LOOK_AGAIN_S)
