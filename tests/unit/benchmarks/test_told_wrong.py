"""What `benchmarks.told_wrong` tells, and its figures."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import iteration_grid, tide_parts
from benchmarks.contenders import ROOFLINE
from benchmarks.told_wrong import LAWS, OTHERS, SEEDS, WRONGS, case_of, figures_of, seconds_of
from benchmarks.wrong_rates import Wrong
from services.scheduler.policy.situation import Situation
from services.scheduler.policy.trainer_rates import trainer_curve
from services.scheduler.state.remembered import Remembered, as_configured
from simulator.iteration import SimulatedIteration
from simulator.scenario import load_scenario
from tests.unit.benchmarks.small_iteration import SMALL


def true_situation(law: str) -> Situation:
    simulated = SimulatedIteration(load_scenario(LAWS[law], SMALL), 1)
    return simulated.situations.situation(simulated.world(as_configured(simulated.spec)), Remembered())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", WRONGS)
def test_every_telling_reaches_the_policies_under_both_laws(law: str, name: str) -> None:
    true, wrong = true_situation(law), WRONGS[name]
    told = wrong.distorted(true)
    assert told != true
    sizes = np.array([4, 8, 12])
    rates = [trainer_curve(each).tokens_per_s(sizes, copy_size=4) for each in (true, told)]
    assert rates[1] == pytest.approx(wrong.trainer * rates[0])
    assert told.costs.decode.base_s * wrong.decode == pytest.approx(true.costs.decode.base_s)


def test_three_tellings_are_wrong_in_three_values_at_once() -> None:
    def num_wrong(wrong: Wrong) -> int:
        return sum(
            each != usual
            for each, usual in zip(
                (wrong.trainer, wrong.decode, wrong.median, wrong.sigma, wrong.are_hints_shuffled),
                (1.0, 1.0, 1.0, 1.0, False),
                strict=True,
            )
        )

    assert [num_wrong(each) for each in WRONGS.values()] == [1] * 9 + [3] * 3


def test_nothing_was_chosen_on_the_seeds() -> None:
    others = {*tide_parts.TUNING, *tide_parts.REPORTED}
    for cell in iteration_grid.CELLS:
        others.update(cell.seeds)
    assert not others & set(SEEDS)


@pytest.mark.long
def test_tide_told_wrong_chooses_otherwise_and_told_right_is_the_same_for_every_telling() -> None:
    wrongs = {"right": Wrong(), "wrong": Wrong(trainer=3.0, decode=0.3, sigma=3.0)}
    long = ("lengths.median_tokens=4000", "lengths.max_tokens=16000", "algorithm.prompts_per_iteration=64")
    rows = seconds_of(load_scenario(ROOFLINE, [*SMALL, *long]), 1, wrongs)
    assert rows["right"]["tide"] == rows["right"]["told_right"] == rows["wrong"]["told_right"]
    assert rows["wrong"]["tide"] != rows["right"]["tide"]
    assert {*rows["wrong"]} == {"tide", "told_right", *OTHERS}


def test_the_worst_case_is_the_one_with_the_worst_median_over_seeds() -> None:
    def row(tide: float) -> dict[str, float]:
        return {"tide": tide, "told_right": 100.0, "dynarl": 120.0, "phases_ordered": 110.0}

    cases = [
        case_of("mild", [row(100), row(101), row(130)]),
        case_of("bad", [row(104), row(110), row(112)]),
    ]
    found = figures_of(cases)
    assert found["worst_told_wrong"] == pytest.approx(1.10)
    assert found["worst_vs_dynarl"] == pytest.approx(120 / 110)
    assert found["worst_vs_phases_ordered"] == pytest.approx(1.0)
    assert (found["told_wrong_min"], found["told_wrong_max"]) == pytest.approx((1.0, 1.3))
