"""A step lasts as long as the law says, and the steps that lasted longer are counted."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.unit.pace.hands import Hands
from tidegate.config.sections.pace import PaceSection
from tidegate.pace.law import PaceLaw
from tidegate.runtime.pacer import Pacer


def paced(hands: Hands, counts: list[Mapping[str, int]]) -> Pacer:
    law = PaceLaw(PaceSection())
    return Pacer(law, on_counts=counts.append, clock=hands, sleep=hands.sleep, cpu_clock=lambda: hands.now_s / 4)


def count(*, late: int, cpu_us: int) -> dict[str, int]:
    return {"paced_steps": 1, "late_steps": late, "cpu_us": cpu_us}


def test_a_step_ends_no_sooner_than_modelled() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    with paced(hands, counts).step(lambda law: 2.0):
        hands.now_s += 0.5
    assert hands.now_s == 102.0
    assert counts == [count(late=0, cpu_us=500_000)]


@pytest.mark.parametrize(("worked_s", "want_late"), [(2.0, 0), (2.19, 0), (2.21, 1), (9.0, 1)])
def test_a_step_over_a_tenth_longer_is_counted_as_late(worked_s: float, want_late: int) -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    with paced(hands, counts).step(lambda law: 2.0):
        hands.now_s += worked_s
    assert hands.now_s == 100.0 + worked_s, "a late step waits for nothing"
    assert [each["late_steps"] for each in counts] == [want_late]


def test_a_late_wake_up_makes_a_step_late_too() -> None:
    hands, counts = Hands(overslept_s=0.3), list[Mapping[str, int]]()
    with paced(hands, counts).step(lambda law: 2.0):
        hands.now_s += 0.5
    assert [each["late_steps"] for each in counts] == [1]


def test_a_wait_ends_at_its_limit_and_goes_on_with_the_next() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    pacer = paced(hands, counts)
    step = pacer.begin(lambda law: 2.0)
    assert not pacer.end(step, by_s=100.5)
    assert (hands.now_s, counts) == (100.5, [])
    assert not pacer.end(step, by_s=100.4), "a limit in the past waits for nothing"
    assert hands.now_s == 100.5
    assert pacer.end(step, by_s=103.0)
    assert hands.now_s == 102.0
    assert len(counts) == 1


def test_a_step_that_is_not_counted_lasts_as_long() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    pacer = paced(hands, counts)
    step = pacer.begin(lambda law: 2.0)
    step.is_counted = False
    assert pacer.end(step)
    assert (hands.now_s, counts) == (102.0, [])


def test_work_that_fails_is_neither_waited_for_nor_counted() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    with pytest.raises(ArithmeticError), paced(hands, counts).step(lambda law: 2.0):
        raise ArithmeticError
    assert (hands.now_s, counts) == (100.0, [])


def test_without_a_law_nothing_waits_and_nothing_is_counted() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    pacer = Pacer(None, on_counts=counts.append, clock=hands, sleep=hands.sleep)
    with pacer.step(lambda law: 2.0):
        hands.now_s += 0.5
    assert pacer.end(pacer.begin(lambda law: 2.0), by_s=0.0)
    assert (hands.now_s, counts) == (100.5, [])
