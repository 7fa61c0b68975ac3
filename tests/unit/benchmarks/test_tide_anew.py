"""`tide` anew beside saved seconds: what was saved by other code is noticed."""

from __future__ import annotations

import pytest

from benchmarks.contenders import ROOFLINE
from benchmarks.direct import simulate
from benchmarks.iteration_grid import Cell
from benchmarks.tide_anew import CHECK, SavedIsOld, cell_case, seconds_of
from benchmarks.training_sim import ROOFLINE as TRAINING
from benchmarks.training_sim import split_of, split_text
from simulator.policies import policies_of
from simulator.scenario import load_scenario
from tests.unit.benchmarks.small_iteration import SMALL

SEED = 1


@pytest.fixture(scope="module")
def check_s() -> float:
    scenario = load_scenario(ROOFLINE, SMALL)
    policy = policies_of((CHECK,), scenario)[CHECK]
    return simulate(scenario, policy, name=CHECK, seed=SEED, directly=True).iteration_s


def test_saved_seconds_of_the_same_code_are_taken_and_those_of_other_code_refused(check_s: float) -> None:
    scenario = load_scenario(ROOFLINE, SMALL)
    saved = {CHECK: check_s, "dynarl": 77.0, "tide": 1.0}
    found = seconds_of(scenario, SEED, saved)
    assert (found["dynarl"], found[CHECK]) == (77.0, check_s)
    assert found["tide"] > 1.0
    with pytest.raises(SavedIsOld, match=r"run python -m benchmarks.iteration_sim --save"):
        seconds_of(scenario, SEED, {**saved, CHECK: check_s * (1 + 1e-12)})


def test_a_case_has_tides_present_seconds_and_a_best_schedule_that_is_no_slower(check_s: float) -> None:
    names = ("static", "fused", "fused_ordered", "split", "best_split", "rlinf", "rlinf_ordered", "rlinf_wait")
    others = {name: [2 * check_s] for name in (*names, "dynarl", "dynarl_priority")}
    saved = {
        "seeds": [SEED],
        "split": "4/10/2",
        "by_seed_s": {**others, CHECK: [check_s], "tide": [1.0], "planned_once": [1.0], "bound": [check_s / 4]},
        "best_schedule_seeds": [SEED],
        "best_schedule_s": [2 * check_s],
        "best_schedule_from": ["a search"],
    }
    case = cell_case(Cell("small", SMALL, (SEED,)), saved)
    assert case["tide_vs_phases_ordered"] == [pytest.approx(check_s / case["tide_s"])]
    assert case["best_schedule_s"][0] <= case["tide_s"]
    assert case["best_schedule_from"] != ["a search"]


def test_a_saved_split_is_read_as_it_was_written() -> None:
    scenario = TRAINING.scenario(200)
    assert split_text(scenario, split_of("16/12/4 as_given", scenario)) == "16/12/4 as_given"
