"""Methods that end a rollout early: what they train, and what was published of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulator.rounds import METHODS, PARTIAL, Tally, tally_of
from simulator.scenario import Scenario, ScenarioError
from tests.unit.simulator.scenarios import published, small


def tallies(scenario: Scenario, *, num_iterations: int, seed: int) -> dict[str, Tally]:
    return {name: tally_of(name, scenario, num_iterations=num_iterations, seed=seed) for name in METHODS}


@pytest.fixture(scope="module")
def found() -> dict[str, Tally]:
    return tallies(small(), num_iterations=6, seed=3)


def test_the_same_scenario_and_seed_give_the_same_figures(found: dict[str, Tally]) -> None:
    assert tallies(small(), num_iterations=6, seed=3) == found
    assert tallies(small(), num_iterations=6, seed=4) != found


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_the_jobs_number_of_prompts_and_responses(name: str, found: dict[str, Tally]) -> None:
    tally = found[name]
    assert tally.num_iterations == 6
    assert len(tally.trained) == 6 * 16
    assert tally.num_responses == 6 * 16 * 4


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_is_trained_at_most_once(name: str, found: dict[str, Tally]) -> None:
    assert max(Counter(found[name].trained).values()) == 1


def test_prompts_that_are_not_trained_yet_wait(found: dict[str, Tally]) -> None:
    """Four short rounds of 20 prompts leave 16, which the fifth iteration trains; then a sixth leaves four."""
    assert sorted(found["tail_batching"].trained[: 5 * 16]) == list(range(5 * 16))
    issued = range(6 * 16 + round((PARTIAL - 1) * 16))
    assert set(found["partial"].trained) < set(issued)


def test_the_same_prompts_are_trained_by_all_that_train_each(found: dict[str, Tally]) -> None:
    assert sorted(found["phases"].trained) == sorted(found["phases_ordered"].trained) == list(range(6 * 16))
    assert found["phases"].trained_tokens == found["phases_ordered"].trained_tokens


def test_phases_waste_nothing_and_tokens_of_older_weights_are_of_partial_rollouts_alone(
    found: dict[str, Tally],
) -> None:
    assert [name for name in METHODS if found[name].wasted_share == 0] == ["phases", "phases_ordered"]
    assert [name for name in METHODS if found[name].old_tokens] == ["partial"]


def test_what_is_dropped_leaves_shorter_responses(found: dict[str, Tally]) -> None:
    means = {name: tally.trained_tokens / tally.num_responses for name, tally in found.items()}
    assert means["dropped"] < 0.8 * means["phases"]


def test_lengths_of_one_iteration_are_refused(tmp_path: Path) -> None:
    (path := tmp_path / "lengths.txt").write_text("1 2 3 4\n" * 16)
    scenario = small(lengths={"law": "trace", "file": str(path)})
    with pytest.raises(ScenarioError, match=r"lengths\.law=trace has the prompts of one iteration"):
        tally_of("partial", scenario, num_iterations=1)


def test_lengths_of_several_turns_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"lengths\.mean_turns=3: a rollout that ends early"):
        tally_of("partial", small(lengths={"mean_turns": 3}), num_iterations=1)


@pytest.mark.long
def test_tail_batching_gains_what_is_published_within_0_25() -> None:
    """Published (RollPacker, table 2, 7B with at most 8k tokens): training takes 1 / 1.30 of the time.

    The lengths are assumed: a law whose third quartile is 1k, as they show for another model, of which two thirds of
    the variance lie between prompts. The number of GPUs and of prompts is assumed too. Every iteration has the same
    number of responses, so its time is compared. In trained tokens a second the gain is smaller.
    """
    sizes = ("algorithm.prompts_per_iteration=64", "algorithm.group_size=16")
    lengths = ("lengths.median_tokens=550", "lengths.sigma_prompt=0.8", "lengths.sigma_group=0.6")
    scenario = published(16, *sizes, *lengths, "lengths.max_tokens=8192")
    phases, tail = (tally_of(name, scenario, num_iterations=10, seed=1) for name in ("phases", "tail_batching"))
    assert phases.seconds / tail.seconds == pytest.approx(1.30, abs=0.25)
    assert 1 < tail.rate_tokens_per_s / phases.rate_tokens_per_s < phases.seconds / tail.seconds


@pytest.mark.long
def test_partial_rollouts_gain_what_is_published_within_0_15() -> None:
    """Published (APRIL, abstract): 1.225 times the tokens of a rollout a second, in the mean, and 1.44 at most.

    Assumed: 8 GPUs, 32 prompts of 8 responses, 8k tokens in the median and at most 16k. Most of the trained tokens are
    of older weights.
    """
    sizes = ("algorithm.prompts_per_iteration=32", "algorithm.group_size=8")
    lengths = ("lengths.median_tokens=8000", "lengths.sigma_prompt=0.45", "lengths.sigma_group=0.3")
    scenario = published(8, *sizes, *lengths, "lengths.max_tokens=16384")
    phases, partial = (tally_of(name, scenario, num_iterations=8, seed=1) for name in ("phases", "partial"))
    gain = partial.trained_tokens / partial.rollout_s / (phases.trained_tokens / phases.rollout_s)
    assert gain == pytest.approx(1.225, abs=0.15)
    assert partial.old_tokens / partial.trained_tokens > 0.5
