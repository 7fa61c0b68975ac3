"""A sink that keeps its rows, and an outlet to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidegate.tracking.metrics import Row
from tidegate.tracking.outlet import Outlet, Sink

PATIENCE_S = 20.0


class Written:
    """A sink that accepts rows after `let_go` is set, except those for which `fails` holds."""

    def __init__(self, *, fails: Callable[[Row], bool] = lambda _: False, is_free: bool = True) -> None:
        self.rows: list[Row] = []
        self.is_closed = False
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self._wrote = threading.Condition()
        self._fails = fails
        if is_free:
            self.let_go.set()

    def write(self, row: Row) -> None:
        self.reached.set()
        self.let_go.wait()
        if self._fails(row):
            raise ConnectionError("no route to host")
        with self._wrote:
            self.rows.append(row)
            self._wrote.notify_all()

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]

    def until(self, num_rows: int) -> None:
        """Wait until it has `num_rows` rows."""
        with self._wrote:
            assert self._wrote.wait_for(lambda: len(self.rows) >= num_rows, PATIENCE_S)

    def close(self) -> None:
        self.is_closed = True


def outlet(sink: Sink, *, capacity: int = 100) -> Outlet:
    return Outlet("sink", lambda: sink, capacity=capacity)
