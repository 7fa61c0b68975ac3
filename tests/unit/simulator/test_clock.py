"""The virtual clock runs actions by time, then in the order of their scheduling."""

from __future__ import annotations

from functools import partial

from simulator.clock import Clock


def run(clock: Clock) -> None:
    while clock.step():
        pass


def test_actions_of_one_instant_run_in_the_order_of_their_scheduling() -> None:
    clock, names = Clock(), list[str]()
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.schedule(at_s, partial(names.append, name))
    run(clock)
    assert names == ["a", "b", "c"]


def test_time_never_runs_backwards() -> None:
    clock, times = Clock(), list[float]()

    def late() -> None:
        clock.schedule(1.0, lambda: times.append(clock.now_s))

    clock.schedule(5.0, late)
    run(clock)
    assert times == [5.0]


def test_a_cancelled_action_does_not_run() -> None:
    clock, names = Clock(), list[str]()
    clock.schedule(1.0, partial(names.append, "cancelled")).is_cancelled = True
    run(clock)
    assert names == []
