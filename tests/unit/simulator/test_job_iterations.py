"""The lengths, hints and filtered groups of a job's iterations."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import pytest

from simulator.job_iterations import SimulatedJob, law_mean
from simulator.lengths import Lengths
from simulator.scenario import Scenario, ScenarioError, parse_scenario

SMALL: dict[str, Any] = {
    "physics": {"law": "published_fit"},
    "cluster": {"nodes": {"n0": 4, "n1": 4}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6-7"}},
    "algorithm": {"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 2},
    "lengths": {"median_tokens": 800, "max_tokens": 30_000},
}


def scenario(drift: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    return parse_scenario({**SMALL, "drift": drift or {}, **changes})


def lengths_of(job: SimulatedJob, number: int) -> Lengths:
    return job.iteration(number).workload.lengths


def mean_of(job: SimulatedJob, number: int) -> float:
    return law_mean(job.iteration(number).scenario.lengths)


def test_the_first_iteration_is_that_of_one_run_and_the_next_ones_are_others() -> None:
    job = SimulatedJob(scenario(), 3, seed=5)
    assert job.iteration(0).workload.lengths == scenario().workload(5).lengths
    assert len({lengths_of(job, number) for number in range(3)}) == 3
    assert mean_of(job, 2) == mean_of(job, 0)


@pytest.mark.parametrize("law", ["lognormal", "long_tailed"])
@pytest.mark.parametrize(
    ("drift", "want"),
    [
        ({"mean_tokens": {0: 1500, 10: 10_000}}, [1500, 5750, 10_000]),
        ({"mean_tokens": "0: 1000", "spikes": [{"iteration": 5, "factor": 3, "iterations": 5}]}, [1000, 3000, 1000]),
        ({"mean_tokens": "0: 1000", "sigma_prompt": {0: 0.1, 10: 0.9}}, [1000, 1000, 1000]),
        ({"curve": "to_10k"}, [1500, 1712.5, 1925]),
    ],
)
def test_the_mean_of_the_law_is_the_curves(law: str, drift: dict[str, Any], want: list[float]) -> None:
    job = SimulatedJob(scenario(drift, lengths={**SMALL["lengths"], "law": law}), 11, seed=0)
    assert [mean_of(job, number) for number in (0, 5, 10)] == pytest.approx(want)


def test_the_drawn_lengths_have_the_mean_of_the_curve() -> None:
    many = {"prompts_per_iteration": 2000, "group_size": 2, "n_minibatches": 2}
    job = SimulatedJob(scenario({"mean_tokens": {0: 1500, 4: 10_000}}, algorithm=many), 5, seed=0)
    for number, want in ((0, 1500), (4, 10_000)):
        drawn = [sum(turns) for group in lengths_of(job, number).turns for turns in group]
        assert fmean(drawn) == pytest.approx(want, rel=0.05)


def test_a_relative_curve_multiplies_the_scenarios_mean_and_a_curve_of_medians_gives_medians() -> None:
    job = SimulatedJob(scenario({"curve": "dapo"}), 241, seed=0)
    assert [mean_of(job, 240) / mean_of(job, 0)] == pytest.approx([2.5])
    medians = SimulatedJob(scenario({"median_tokens": {0: 100, 10: 300}}), 6, seed=0)
    assert medians.iteration(5).scenario.lengths.median_tokens == 200


def test_the_limits_of_a_named_curve_rise_in_steps_and_the_job_knows_the_longest() -> None:
    job = SimulatedJob(scenario({"curve": "r1_distill_1_5b"}), 360, seed=0)
    assert [job.iteration(number).scenario.lengths.max_tokens for number in (0, 199, 200, 359)] == [
        8192,
        8192,
        16_384,
        24_576,
    ]
    assert job.spec.lengths.max_tokens == 24_576


def test_the_first_epoch_has_no_hint_and_later_ones_the_level_of_the_epoch_before() -> None:
    """An epoch of 24 prompts and iterations of 16: the first 8 prompts come again in the second half of iteration 1."""
    exact = {**SMALL["lengths"], "hint_sigma": 0, "sigma_group": 0, "min_tokens": 1}
    drift = {"epoch_prompts": 24, "median_tokens": {0: 100, 3: 400}}
    job = SimulatedJob(scenario(drift, lengths=exact), 4, seed=0)
    first, second, third = (lengths_of(job, number) for number in range(3))
    assert first.hints == (0.0,) * 16
    assert second.hints[:8] == (0.0,) * 8
    assert [int(hint) for hint in second.hints[8:]] == [sum(group[0]) for group in first.turns[:8]]
    assert [int(hint) for hint in third.hints[:8]] == [sum(group[0]) for group in first.turns[8:]]
    ratios = [sum(later[0]) / sum(earlier[0]) for earlier, later in zip(first.turns[:8], second.turns[8:], strict=True)]
    assert ratios == pytest.approx([2.0] * 8, rel=0.05)


def test_without_an_epoch_every_prompt_has_a_hint_of_its_present_level() -> None:
    exact = {**SMALL["lengths"], "hint_sigma": 0, "sigma_group": 0, "min_tokens": 1}
    own = lengths_of(SimulatedJob(scenario(lengths=exact), 2, seed=0), 1)
    assert np.floor(own.hints).tolist() == [sum(group[0]) for group in own.turns]


def test_groups_are_filtered_by_their_share_and_the_lengths_stay_the_same() -> None:
    plain, filtering = (SimulatedJob(scenario(drift), 5, seed=0) for drift in ({}, {"trained_share": {0: 1, 4: 0.5}}))
    filtered = [filtering.iteration(number).workload.filtered for number in range(5)]
    assert [len(each) for each in filtered] == [0, 2, 4, 6, 8]
    assert lengths_of(plain, 4) == lengths_of(filtering, 4)


def test_lengths_are_as_in_a_longer_job() -> None:
    short, long = (SimulatedJob(scenario({"curve": "to_10k"}), number, seed=3) for number in (3, 9))
    assert lengths_of(short, 2) == lengths_of(long, 2)


@pytest.mark.parametrize(
    ("changes", "num_iterations", "want"),
    [
        ({}, 0, "--iterations 0: a job has from 1 to 100,000 iterations"),
        ({}, 100_001, "--iterations 100,001: a job has from 1 to 100,000 iterations"),
        (
            {"drift": {"mean_tokens": "0: 40000"}},
            3,
            "drift asks for a mean of 40,000 tokens in iteration 0, and no law",
        ),
        (
            {"drift": {"mean_tokens": "0: 20000", "spikes": [{"iteration": 2, "factor": 2, "iterations": 1}]}},
            3,
            "drift asks for a mean of 40,000 tokens in iteration 2",
        ),
        (
            {"faults": [{"at_s": 1, "kind": "gpu", "gpu": 1, "iteration": 3}]},
            3,
            "faults.0.iteration=3 and the run has 3 iterations, counted from 0: give --iterations 4 or more",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes: dict[str, Any], num_iterations: int, want: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        SimulatedJob(parse_scenario({**SMALL, **changes}), num_iterations, seed=0)
    assert str(caught.value).startswith(want)
