"""Outlets: nothing waits for a sink, and every row that it did not take is counted."""

from __future__ import annotations

import time
from typing import NoReturn

from tests.unit.tracking.fake_sinks import PATIENCE_S, Written, outlet
from tests.unit.tracking.rows import a_row
from tidegate.tracking.outlet import MAX_FAILURES, Account, Outlet, close_all

AT_ONCE_S = 5.0


def test_rows_are_written_in_order_and_the_sink_is_closed_after_the_last() -> None:
    sink = Written()
    of = outlet(sink)
    for step in range(50):
        of.offer(a_row(step))
    assert of.closed(timeout_s=PATIENCE_S) == Account(50, 0, 0, None, None, "")
    assert sink.steps == list(range(50))
    assert sink.is_closed


def test_a_sink_that_blocks_delays_nothing_and_rows_beyond_the_queue_are_dropped_and_counted() -> None:
    sink = Written(is_free=False)
    of = outlet(sink, capacity=3)
    of.offer(a_row(0))
    assert sink.reached.wait(PATIENCE_S)
    began_s = time.monotonic()
    for step in range(1, 10):
        of.offer(a_row(step))
    assert time.monotonic() - began_s < AT_ONCE_S
    sink.let_go.set()
    account = of.closed(timeout_s=PATIENCE_S)
    assert account == Account(written=3, dropped=7, pending=0, first_dropped=3, last_dropped=9, error="")
    assert sink.steps == [0, 1, 2]


def test_a_sink_that_never_returns_delays_the_end_only_up_to_the_limit_and_its_rows_are_pending() -> None:
    stuck, sound = Written(is_free=False), Written()
    outlets = [Outlet("stuck", lambda: stuck, capacity=10), Outlet("sound", lambda: sound, capacity=10)]
    for each in outlets:
        each.offer(a_row(0))
        each.offer(a_row(1))
    assert stuck.reached.wait(PATIENCE_S)
    began_s = time.monotonic()
    accounts = close_all(outlets, timeout_s=0.05)
    assert time.monotonic() - began_s < AT_ONCE_S
    assert (accounts["stuck"].written, accounts["stuck"].pending) == (0, 2)
    assert outlets[1].closed(timeout_s=PATIENCE_S).written == 2
    stuck.let_go.set()
    assert outlets[0].closed(timeout_s=PATIENCE_S).written == 2


def test_a_failed_row_is_dropped_and_the_next_rows_are_written() -> None:
    sink = Written(fails=lambda row: row.step in (1, 2, 4))
    of = outlet(sink)
    for step in range(6):
        of.offer(a_row(step))
    assert of.closed(timeout_s=PATIENCE_S) == Account(3, 3, 0, 1, 4, "")
    assert sink.steps == [0, 3, 5]


def test_a_sink_that_fails_repeatedly_is_given_up_and_closed_with_the_reason() -> None:
    sink = Written(fails=lambda row: row.step > 0)
    of = outlet(sink)
    for step in range(10):
        of.offer(a_row(step))
    account = of.closed(timeout_s=PATIENCE_S)
    assert (account.written, account.dropped, account.pending) == (1, 9, 0)
    assert account.error == f"{MAX_FAILURES} rows in a row failed, the last with ConnectionError: no route to host"
    assert sink.is_closed


def test_a_sink_that_cannot_be_opened_drops_all_rows() -> None:
    def open_sink() -> NoReturn:
        raise ModuleNotFoundError("No module named 'wandb'")

    of = Outlet("sink", open_sink, capacity=10)
    of.offer(a_row(0))
    account = of.closed(timeout_s=PATIENCE_S)
    of.offer(a_row(1))
    assert account.written == account.pending == 0
    assert account.error == "it could not be opened: ModuleNotFoundError: No module named 'wandb'"
    assert of.closed(timeout_s=PATIENCE_S).dropped == 2
