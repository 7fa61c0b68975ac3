"""Gains over the best fixed split, and ways that run ahead."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from simulator.asynchrony.course import OnNewWeights
from simulator.best_split import BestSplit, best_split
from simulator.planning.ahead import MOST_STALENESS, Ahead, compared_ahead, staleness_fault
from simulator.planning.cases import CASES
from simulator.planning.gains import AROUND, Gains, gains_over
from simulator.planning.starts import best_start
from simulator.scenario import Scenario
from tests.unit.simulator.plans import job, scenario


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def own(folder: Path) -> Scenario:
    return scenario(job(folder))


@pytest.fixture(scope="module")
def found(folder: Path, own: Scenario) -> BestSplit:
    return best_start(job(folder), own)[0]


@pytest.fixture(scope="module")
def gains(found: BestSplit, own: Scenario) -> Gains:
    return gains_over(found, own)


@pytest.fixture(scope="module")
def ahead(found: BestSplit, own: Scenario) -> Ahead:
    return compared_ahead(found, own, 1)


def test_the_same_scenario_gives_the_same_gains_one_for_each_case(
    found: BestSplit, own: Scenario, gains: Gains
) -> None:
    assert gains == gains_over(found, own)
    assert [each.case for each in gains.cases] == list(CASES)
    low, high = gains.range
    assert low <= gains.median <= high
    assert all(each.gain == each.split_s / each.moving_s for each in gains.cases)


def test_in_each_case_the_split_is_no_slower_than_that_of_the_assumed_case(found: BestSplit, gains: Gains) -> None:
    for each in gains.cases[1:]:
        kept = best_split(each.split.scenario, effort=AROUND, near=found.split)
        assert each.split.seconds <= kept.seconds


def test_every_way_is_beside_strict_tide(ahead: Ahead) -> None:
    assert [way.name for way in ahead.ways] == [
        "the best split",
        "tide",
        OnNewWeights.ENDS_OLD,
        OnNewWeights.COMPUTES_CACHE,
    ]
    assert all(sum(way.gpus) == 16 for way in ahead.ways)
    assert ahead.gain(ahead.ways[1]) == 1


def test_every_way_has_the_same_tokens(ahead: Ahead) -> None:
    """A rollout that runs ahead with the strict split is no slower than strict iterations of the same lengths."""
    assert ahead.ways[2].tokens_per_s > ahead.ways[0].tokens_per_s


def test_other_processes_find_the_same(found: BestSplit, own: Scenario, gains: Gains, ahead: Ahead) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert gains_over(found, own, pool.map) == gains
        assert compared_ahead(found, own, 1, pool.map) == ahead


def test_a_staleness_of_zero_and_a_reproducible_job_are_not_compared(found: BestSplit, own: Scenario) -> None:
    assert "asks for none" in compared_ahead(found, own, 0).refused
    reproducible = own.model_copy(update={"actor_num_logical_shards": 8})
    assert "actor.num_logical_shards" in compared_ahead(found, reproducible, 1).refused


@pytest.mark.parametrize("staleness", [-1, MOST_STALENESS + 1])
def test_a_staleness_outside_its_range_has_the_range_and_a_remedy(staleness: int) -> None:
    assert staleness_fault(staleness).startswith(f"--staleness {staleness} is outside 0 to {MOST_STALENESS}")
    assert [staleness_fault(0), staleness_fault(MOST_STALENESS)] == ["", ""]
