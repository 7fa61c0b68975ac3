"""Policies that are told what is not true."""

from __future__ import annotations

import dataclasses

import pytest

from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.situation import as_configured
from services.scheduler.policy.tide import TidePolicy
from services.scheduler.remembered import Remembered
from simulator.iterating import Simulated
from simulator.misled import Misled, Wrong
from simulator.run import simulate
from simulator.scenario import parse_scenario

SMALL = parse_scenario(
    {
        "cluster": {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-6", "inference": "7"}},
        "algorithm": {"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 2},
        "lengths": {"median_tokens": 800, "max_tokens": 4000},
        "costs": {
            "engine": {"gpus_per_engine": 1, "max_running": 8},
            "trainer": {"rate_gpus": 8, "rate_tokens_per_s": 4000, "fixed_s": 1.0},
        },
    }
)


def test_told_nothing_wrong_a_policy_does_as_it_would() -> None:
    want, found = (simulate(SMALL, policy, seed=1) for policy in (TidePolicy(), Misled(TidePolicy(), Wrong())))
    assert found.decisions == want.decisions
    assert found.iteration_s == want.iteration_s


@pytest.mark.parametrize("wrong", [Wrong(trainer=3.0), Wrong(decode=0.3), Wrong(median=0.3, sigma=2.0)])
def test_a_wrong_telling_changes_what_tide_chooses_and_not_what_the_iteration_takes(wrong: Wrong) -> None:
    want, found = (simulate(SMALL, Misled(TidePolicy(), each), seed=1) for each in (Wrong(), wrong))
    assert found.decisions != want.decisions
    by_the_same_rule = simulate(SMALL, Misled(PhasesPolicy(), wrong), seed=1)
    assert by_the_same_rule.iteration_s == simulate(SMALL, PhasesPolicy(), seed=1).iteration_s


def test_each_factor_is_of_what_is_true() -> None:
    simulated = Simulated(SMALL, 1)
    world = simulated.world(as_configured(simulated.spec))
    true = simulated.seeing.situation(world, Remembered())
    told = Wrong(trainer=1.2, decode=0.8, median=2.0, sigma=1.5).told(true)
    (rate, *_), (want, *_) = told.trainer.training.measured, true.trainer.training.measured
    assert rate.rate_tokens_per_s == pytest.approx(1.2 * want.rate_tokens_per_s)
    assert told.costs.decode.floor_s == pytest.approx(true.costs.decode.floor_s / 0.8)
    assert told.lengths.log_mean == pytest.approx(true.lengths.log_mean + 0.6931, abs=1e-4)
    assert told.lengths.sigma_group == 1.5 * true.lengths.sigma_group
    assert dataclasses.replace(told, trainer=true.trainer, costs=true.costs) == (
        dataclasses.replace(true, lengths=told.lengths)
    )
