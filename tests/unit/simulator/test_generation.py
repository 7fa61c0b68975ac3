"""The parts of an iteration in collocated phases."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.scheduler.policy.phases import PhasesPolicy
from simulator.generation import Response, after_rollout_s, generate
from simulator.run import simulate
from simulator.scenario import Scenario
from tests.unit.simulator.scenarios import small


def responses(scenario: Scenario, seed: int) -> list[Response]:
    return [Response(sum(turns)) for row in scenario.read_lengths(seed).turns for turns in row]


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("changes", [{}, {"actor_layout": {"tp": 2}}, {"actor_num_logical_shards": 4}])
def test_the_sum_is_the_iteration_in_phases(seed: int, changes: dict[str, object]) -> None:
    scenario = small(**changes)
    parts_s = generate(scenario, responses(scenario, seed)).seconds + after_rollout_s(
        scenario, scenario.read_lengths(seed)
    )
    assert parts_s == pytest.approx(simulate(scenario, PhasesPolicy(), seed=seed).iteration_s)


def test_every_response_ends_with_its_tokens() -> None:
    given = responses(small(), 3)
    found = generate(small(), given)
    assert sorted(found.ended) == list(range(len(given)))
    assert found.tokens == tuple(response.tokens for response in given)


def test_a_rollout_ends_when_it_is_told_that_it_is_enough() -> None:
    given = responses(small(), 3)
    asked: list[int] = []

    def is_enough(number: int) -> bool:
        asked.append(number)
        return len(asked) == 20

    found = generate(small(), given, is_enough=is_enough)
    assert list(found.ended) == asked
    assert found.seconds < generate(small(), given).seconds
    for number, (response, tokens) in enumerate(zip(given, found.tokens, strict=True)):
        assert tokens == response.tokens if number in asked else tokens <= response.tokens


def test_a_response_goes_on_from_its_tokens() -> None:
    whole_s, rest_s, none_s = (generate(small(), [Response(1000, generated)]).seconds for generated in (0, 600, 999))
    assert rest_s == pytest.approx(0.4 * whole_s, rel=0.05)
    assert none_s < 0.05 * whole_s


def test_a_rollout_takes_longer_the_more_it_generates() -> None:
    given = responses(small(), 3)
    seconds = [generate(small(), given[:num]).seconds for num in (8, 32, 64)]
    assert all(less_s <= more_s for less_s, more_s in pairwise(seconds))
