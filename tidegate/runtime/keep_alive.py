"""Keeps the messages of a sample stream that a lead holds, so that the stream does not deliver them again.

Invariant: while it runs, a held message is delivered once, however long it is held. [test_keep_alive: delivered_once]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tidegate.ports.bus import SampleDelivery

PER_ACK_WAIT = 3
"""In-progress acks within one ack wait. Two may be late before the stream delivers a held message again."""


async def keep_alive(
    held: Callable[[], Iterable[SampleDelivery]],
    *,
    ack_wait_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Sends in-progress acks for what `held` returns, until it is cancelled."""
    while True:
        await sleep(ack_wait_s / PER_ACK_WAIT)
        # A message whose ack fails is delivered again, which its holder knows.
        await asyncio.gather(*(delivery.in_progress() for delivery in held()), return_exceptions=True)
