"""A sink that rows are given to without waiting: a bounded queue, and a thread that opens, writes and closes the sink.

Invariants: `offer` never waits, whatever the sink does; a row that finds the queue full, or a sink that was given up,
is dropped, counted and told; rows that are written are written in order; `closed` takes no longer than its time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidegate.tracking.metrics import Row

MAX_FAILURES = 3
"""Rows in a row that a sink may fail to take: one may be a hiccup, so many will not end by themselves."""


class Sink(Protocol):
    """Where rows go. Any of its calls may block or raise."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the rows that were offered. `pending`: at the end the sink had still to take them."""

    written: int
    dropped: int
    pending: int
    first_dropped: int | None
    """The step of the first and of the last row that was dropped."""
    last_dropped: int | None
    error: str
    """Why the sink was given up; empty where it was not."""


class Outlet:
    """See the module. `open_sink` is called on the outlet's own thread."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], *, capacity: int) -> None:
        self.name = name
        self._open_sink = open_sink
        self._capacity = capacity
        self._log = structlog.get_logger("tracking").bind(sink=name)
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._is_closing = False
        self._num_written = 0
        self._num_dropped = 0
        self._dropped: tuple[int, int] | None = None
        self._error = ""
        # A daemon: a sink that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def offer(self, row: Row) -> None:
        with self._changed:
            if self._error or len(self._rows) >= self._capacity:
                self._drop(row)
                return
            self._rows.append(row)
            self._changed.notify_all()

    def begin_to_close(self) -> None:
        """Returns at once; what is waiting is still written."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def closed(self, *, timeout_s: float) -> Account:
        """Waits for the end, for so long at most."""
        self.begin_to_close()
        self._thread.join(timeout_s)
        with self._changed:
            first, last = self._dropped if self._dropped else (None, None)
            return Account(self._num_written, self._num_dropped, len(self._rows), first, last, self._error)

    def _drop(self, row: Row) -> None:
        if not self._num_dropped and not self._error:
            self._log.warning("rows dropped: the sink is behind", step=row.step, capacity=self._capacity)
        self._num_dropped += 1
        self._dropped = (self._dropped[0] if self._dropped else row.step, row.step)

    def _run(self) -> None:
        try:
            sink = self._open_sink()
        except Exception as error:  # noqa: BLE001 - the edge: whatever a library raises costs its rows and no more
            self._give_up(f"it could not be opened: {type(error).__name__}: {error}")
            return
        num_failures = 0
        while (row := self._next()) is not None:
            try:
                sink.write(row)
                num_failures = 0
            except Exception as error:  # noqa: BLE001 - as above
                num_failures += 1
                self._log.warning("row not written", step=row.step, error=f"{type(error).__name__}: {error}")
                if num_failures == MAX_FAILURES:
                    self._give_up(f"{MAX_FAILURES} rows in a row failed, the last with {type(error).__name__}: {error}")
                    break
            self._settle(row, was_written=num_failures == 0)
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._log.warning("not closed", error=f"{type(error).__name__}: {error}")

    def _next(self) -> Row | None:
        """The oldest that waits, left where it is until it is settled; None at the end."""
        with self._changed:
            while not self._rows and not self._is_closing:
                self._changed.wait()
            return self._rows[0] if self._rows else None

    def _settle(self, row: Row, *, was_written: bool) -> None:
        with self._changed:
            self._rows.popleft()
            if was_written:
                self._num_written += 1
            else:
                self._drop(row)

    def _give_up(self, why: str) -> None:
        self._log.error("given up", error=why)
        with self._changed:
            self._error = why
            while self._rows:
                self._drop(self._rows.popleft())


def close_all(outlets: Sequence[Outlet], *, timeout_s: float) -> dict[str, Account]:
    """All at once, within the time."""
    ends = time.monotonic() + timeout_s
    for outlet in outlets:
        outlet.begin_to_close()
    return {outlet.name: outlet.closed(timeout_s=max(0.0, ends - time.monotonic())) for outlet in outlets}
