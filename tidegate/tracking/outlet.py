"""An outlet passes rows to a sink without waiting for it: a bounded queue, and a thread that opens, writes and closes.

Invariants:
- `offer` never waits, whatever the sink does. [test_outlet: sink_that_blocks]
- Where the queue is full, or the sink was given up, a row is dropped, counted and reported.
  [test_outlet: sink_that_blocks]
- Rows are written in order. [test_outlet: rows_are_written_in_order]
- `closed` returns within its time limit. [test_outlet: sink_that_never_returns]
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
"""The failures in a row after which a sink is given up.

One may be accidental; this many will not stop by themselves."""


class Sink(Protocol):
    """The destination of rows. Any of its calls may block or raise."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Account:
    """The fates of the offered rows. `pending` counts those that the sink had not taken at the end."""

    written: int
    dropped: int
    pending: int
    first_dropped: int | None
    """The step of the first dropped row; the next field has that of the last one."""
    last_dropped: int | None
    error: str
    """The reason for giving up the sink. Empty where it was not given up."""


class Outlet:
    """An outlet; see the module. It calls `open_sink` on its own thread."""

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
        # Use a daemon thread: a hanging sink must not keep the process alive.
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
        """Begin to close, without waiting. Queued rows are still written."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def closed(self, *, timeout_s: float) -> Account:
        """Close, and wait at most `timeout_s` for the end. Returns the account of the rows."""
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
        except Exception as error:  # noqa: BLE001 - the edge: an error of a library costs only its rows
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
        """The oldest queued row, which stays in the queue until it is settled. None at the end."""
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

    def _give_up(self, reason: str) -> None:
        self._log.error("given up", error=reason)
        with self._changed:
            self._error = reason
            while self._rows:
                self._drop(self._rows.popleft())


def close_all(outlets: Sequence[Outlet], *, timeout_s: float) -> dict[str, Account]:
    """Close all outlets at the same time, within `timeout_s`. Returns their accounts by name."""
    ends = time.monotonic() + timeout_s
    for outlet in outlets:
        outlet.begin_to_close()
    return {outlet.name: outlet.closed(timeout_s=max(0.0, ends - time.monotonic())) for outlet in outlets}
