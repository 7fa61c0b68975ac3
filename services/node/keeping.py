"""A machine's turn to keep a cluster that several machines may keep (`tidegate.cluster.keepers`).

Invariants:
- A machine begins once the keeper is silent or has ended, or was this machine itself.
  [test_keeping: the_keeper_is_silent] [test_keeping: the_keeper_has_ended] [test_keeping: not_wait_for_itself]
- One that was told of other nodes than the keeper does not wait for its turn. [test_keeping: other_nodes_does_not_wait]
- A keeper that cannot write its beats is dead before others begin. [test_keeping: that_cannot_write]
- One whose term was taken is dead at its next beat, or does not begin. [test_keeping: whose_term_was_taken]
  [test_keeping: does_not_begin]
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from tidegate.cluster.keepers import BEAT_S, LOST_S, SILENT_S, Keepers, Term, TermTaken

LOOK_S = 2.0


class OtherCluster(RuntimeError):
    """The keeper was told of other nodes or machines."""


async def claimed(
    keepers: Keepers,
    stopping: asyncio.Event,
    *,
    name: str,
    address: str,
    cluster: str = "",
    says: Callable[[str], None] = lambda _: None,
    now_s: Callable[[], float] = time.monotonic,
    look_s: float = LOOK_S,
) -> Term | None:
    """This machine's term, once it has one. No process of an earlier one of its own is left: the caller has the lock.
    None: `stopping` was set first.

    `says` is told who else keeps the cluster. A storage that does not answer is asked again. OtherCluster."""
    seen, since_s, least, fault = None, now_s(), 0, ""
    while not stopping.is_set():
        try:
            newest = await asyncio.to_thread(keepers.newest, least=least)
            if newest != seen:
                if newest is not None and newest.name != name:
                    if seen is None or newest.number != seen.number:
                        who = f"{newest.name} ({newest.address})"
                        says(f"{who} keeps the cluster, in term {newest.number}; {name} stands by")
                    elif newest.is_other_than(cluster) and not newest.has_ended:
                        raise OtherCluster(f"{newest.name} keeps the cluster with other nodes or machines than {name}")
                seen, since_s = newest, now_s()
            if newest is None or newest.has_ended or newest.name == name or now_s() - since_s >= SILENT_S:
                number = 1 if newest is None else newest.number + 1
                own = await asyncio.to_thread(keepers.claim, number, name=name, address=address, cluster=cluster)
                if own is None:
                    least = number
                elif stopping.is_set():
                    await asyncio.to_thread(keepers.end, own)
                else:
                    return own
                continue
        except FileNotFoundError:
            least = 0  # removed between two looks
        except OSError as error:
            if (told := f"whose turn it is cannot be told: {error}") != fault:
                says(fault := told)
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), look_s)
    return None


class Beats:
    """Writes the beats of a term: the first one now, the others in a thread, until `end`. The kernel's timer ends this
    process where one takes too long, whatever the process does then; its children die with it."""

    def __init__(
        self, keepers: Keepers, term: Term, *, goes_on: bool = False, beat_s: float = BEAT_S, lost_s: float = LOST_S
    ) -> None:
        """`goes_on`: this process had the term before, and its timer runs: it bears a storage that does not answer, as
        it would have. TermTaken: the claim of the term took too long. OSError."""
        self._keepers = keepers
        self._beat_s = beat_s
        self._lost_s = lost_s
        self._ending = threading.Event()
        self._log = structlog.get_logger("agent")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self.term = term
        """As the last beat has it."""
        try:
            self.term = self._beat(term)
        except OSError as error:
            if not goes_on:
                raise
            self._log.warning("no beat", error=str(error))
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Lets another machine begin at once. Call it when nothing of the cluster runs here any more."""
        self._ending.set()
        self._thread.join(self._lost_s)
        with suppress(OSError):
            self._keepers.end(self.term)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _beat(self, term: Term) -> Term:
        began_s = time.monotonic()
        now = self._keepers.beat(term)
        # From the start of the beat: that is when others may have seen it.
        signal.setitimer(signal.ITIMER_REAL, max(began_s + self._lost_s - time.monotonic(), 1e-3))
        return now

    def _run(self) -> None:
        while not self._ending.wait(self._beat_s):
            try:
                self.term = self._beat(self.term)
            except TermTaken as taken:
                # Not to the log: it is on the storage that had stood still.
                print(taken, file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            except OSError as error:
                self._log.warning("no beat", error=str(error))
