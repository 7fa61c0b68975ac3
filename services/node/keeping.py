"""A machine's turn to keep a cluster that several machines may keep (`tidegate.cluster.keepers`).

Invariants:
- A machine begins once the keeper is silent or has ended, or was this machine itself.
  [test_keeping: the_keeper_is_silent] [test_keeping: the_keeper_has_ended] [test_keeping: not_wait_for_itself]
- A keeper that cannot write its beats is dead before others begin. [test_keeping: that_cannot_write]
- One whose term was taken is dead at its next beat. [test_keeping: whose_term_was_taken]
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from tidegate.cluster.keepers import BEAT_S, LOST_S, SILENT_S, Keepers, Term, TermTaken

LOOK_S = 2.0


async def claimed(
    keepers: Keepers,
    *,
    name: str,
    address: str,
    waits_for: Callable[[Term], None] = lambda _: None,
    now_s: Callable[[], float] = time.monotonic,
    look_s: float = LOOK_S,
) -> Term:
    """This machine's term, once it has one. No process of an earlier one of its own is left: the caller has the lock.

    `waits_for` is called with each other keeper. A storage that does not answer is asked again."""
    seen, since_s, least = None, now_s(), 0
    while True:
        with suppress(OSError):
            newest = await asyncio.to_thread(keepers.newest, least=least)
            if newest != seen:
                if newest is not None and (seen is None or newest.number != seen.number):
                    waits_for(newest)
                seen, since_s = newest, now_s()
            is_over = newest is None or newest.has_ended or newest.name == name or now_s() - since_s >= SILENT_S
            if is_over:
                number = 1 if newest is None else newest.number + 1
                own = await asyncio.to_thread(keepers.claim, number, name=name, address=address)
                if own is not None:
                    return own
                least = number
                continue
        await asyncio.sleep(look_s)


class Beats:
    """Writes the beats of a term in a thread, from its making to `end`. The kernel's timer ends this process where one
    takes too long, whatever the process does then; its children die with it."""

    def __init__(self, keepers: Keepers, term: Term, *, beat_s: float = BEAT_S, lost_s: float = LOST_S) -> None:
        self._keepers = keepers
        self._term = term
        self._beat_s = beat_s
        self._lost_s = lost_s
        self._ending = threading.Event()
        self._log = structlog.get_logger("agent")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, lost_s)
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Lets another machine begin at once. Call it when nothing of the cluster runs here any more."""
        self._ending.set()
        self._thread.join(self._lost_s)
        with suppress(OSError):
            self._keepers.end(self._term)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _run(self) -> None:
        while not self._ending.wait(self._beat_s):
            began_s = time.monotonic()
            try:
                self._term = self._keepers.beat(self._term)
            except TermTaken as taken:
                self._log.error("another machine keeps the cluster", error=str(taken))
                os.kill(os.getpid(), signal.SIGKILL)
            except OSError as error:
                self._log.warning("no beat", error=str(error))
                continue
            # From the start of the beat: that is when others may have seen it.
            left_s = began_s + self._lost_s - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))
