"""Opens the store for a scheduler that starts, and waits for a store or a bus that does not answer yet.

A scheduler may start while its store fails over, or answers nobody in time on a busy machine. It asks again until the
limit, and says so in its log. After the limit its process ends with the reason, and the launcher starts another.

Invariants:
- One call without an answer ends no start. [test_opening: without_an_answer_ends_no_start]
- A start that fails has said why. [test_opening: says_why_and_fails]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from tidegate.ownership.adoption import AskGates
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable, VersionConflict
from tidegate.ports.bus import BusUnavailable
from tidegate.ports.store import Identity, Store
from tidegate.types import InstanceId, JobId

LIMIT_S = 5.0
"""The limit of one start. Five restarts with their pauses must fit the launcher's minute
(`launcher.services._MAX_RESTARTS`). Otherwise a scheduler whose store never answers would be started for ever."""
RETRY_S = 0.2


class Adopt(Protocol):
    """`tidegate.ownership.adoption` of one store: by this scheduler, or by its cluster."""

    async def __call__(self, ask_gates: AskGates, *, least_term: int = 0) -> Identity: ...


async def open_store(
    store: Store,
    adopt: Adopt,
    ask_gates: AskGates,
    *,
    job: JobId,
    name: InstanceId,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> int:
    """Has the store adopted. Returns the number of this start of `name` for the job.

    StoreUnavailable, BusUnavailable, StoreNotAdopted, VersionConflict: the last reason, after `LIMIT_S`.
    """
    log = structlog.get_logger("opening")
    ends_s = now() + LIMIT_S
    while True:
        try:
            await adopt(ask_gates)
            return await store.next_boot(job, name)
        except (StoreUnavailable, BusUnavailable, StoreNotAdopted, VersionConflict) as error:
            left_s = ends_s - now()
            if left_s <= 0:
                log.error("cannot start without the store", limit_s=LIMIT_S, error=str(error))
                raise
            log.warning("store not open yet: asking again", left_s=round(left_s, 1), error=str(error))
        await sleep(RETRY_S)
