"""Schedules: the rates are those of Megatron's own scheduler, and a contradictory schedule is refused."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lr.schedules import RATES, SHAPES, Groups, schedule_of
from tidegate.lr.errors import BudgetRefused, LrError, NominalRefused, ScheduleRefused
from tidegate.lr.schedule import Decay, LrSchedule, Steps, exact_steps
from tidegate.megatron.lr import param_scheduler


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    budget=st.fractions(2, 5000, max_denominator=97),
    part=st.fractions(0, Fraction(6, 7), max_denominator=7),
    progress=st.fractions(0, 6000, max_denominator=128) | st.integers(0, 6000),
    has_floor=st.booleans(),
)
def test_the_rate_is_megatrons_at_any_progress(
    shape: str, budget: Fraction, part: Fraction, progress: Steps, has_floor: bool
) -> None:
    schedule = schedule_of(shape, budget=budget, warm_up=budget * part, **(RATES if has_floor else {}))
    scheduler = param_scheduler(Groups(), schedule, weight_decay=0.0)
    scheduler.num_steps = progress
    assert schedule.rate(progress) == scheduler.get_lr({})


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_steps_give_the_rates_of_megatrons_scheduler_step_by_step(shape: str) -> None:
    schedule = schedule_of(shape, budget=60, warm_up=7, **RATES)
    groups = Groups()
    scheduler = param_scheduler(groups, schedule, weight_decay=0.0)
    for step in range(80):
        rate = groups.param_groups[0]["lr"]
        assert (schedule.rate(step), schedule.rate(Fraction(step))) == (rate, rate), step
        scheduler.step(1)


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"constant"}))
def test_beyond_the_budget_the_rate_is_the_minimum(shape: str) -> None:
    schedule = schedule_of(shape, budget=10, warm_up=2, **RATES)
    assert {schedule.rate(step) for step in (11, Fraction(21, 2), 10**12)} == {1e-7}


def test_a_constant_rate_may_warm_up_for_longer_than_its_budget() -> None:
    schedule = LrSchedule(1e-3, budget=2, warm_up=4)
    assert [schedule.rate(step) for step in range(6)] == [0.0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3]
    scheduler = param_scheduler(Groups(), schedule, weight_decay=0.0)
    scheduler.num_steps = 3
    assert scheduler.get_lr({}) == 0.75e-3


BAD: dict[str, tuple[dict[str, Any], type[LrError], str]] = {
    "a warm-up as long as the budget": (
        {"decay": Decay.COSINE, "warm_up": 10},
        ScheduleRefused,
        "warm_up=10 steps leave nothing of a budget of 10",
    ),
    "a longer one": ({"decay": Decay.LINEAR, "warm_up": 11}, ScheduleRefused, "warm_up=11 steps leave nothing"),
    "no budget": ({"budget": 0}, BudgetRefused, "budget=0 is less than one step"),
    "a budget that floors to 0": ({"budget": Fraction(31, 32)}, BudgetRefused, "budget=31/32 is less than one step"),
    "a float": ({"budget": 10.0}, ScheduleRefused, "budget=10.0 is no number of steps"),
    "NaN": ({"warm_up": math.nan}, ScheduleRefused, "warm_up=nan is no number of steps"),
    "a truth": ({"budget": True}, ScheduleRefused, "budget=True is no number of steps"),
    "a warm-up that ends before it begins": ({"warm_up": -1}, ScheduleRefused, "warm_up=-1 is no number of steps"),
    "a minimum above the peak": ({"minimum": 1.0}, ScheduleRefused, "minimum=1.0 must lie between 0 and the peak"),
    "a start above the peak": ({"initial": 1.0}, ScheduleRefused, "initial=1.0"),
    "a rate without end": ({"peak": math.inf}, ScheduleRefused, "must be finite"),
    "WSD without its end": ({"decay": Decay.WSD}, ScheduleRefused, "wsd_steps=0 must be above 0"),
    "an end of WSD within the warm-up": (
        {"decay": Decay.WSD, "warm_up": 6, "wsd_steps": 5},
        ScheduleRefused,
        "fit the 4 steps that follow the warm-up",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_contradictory_schedule_is_refused(case: str) -> None:
    fields, kind, want = BAD[case]
    with pytest.raises(kind, match=want):
        LrSchedule(**{"peak": 1e-3, "budget": 10, **fields})


@pytest.mark.parametrize("nominal", [0, -1, Fraction(-1, 2), 1.0, math.nan, True, "1", None])
def test_a_number_of_steps_must_be_exact_and_above_0(nominal: object) -> None:
    with pytest.raises(NominalRefused, match="nominal="):
        exact_steps(nominal)
