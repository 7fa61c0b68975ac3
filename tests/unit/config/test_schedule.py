"""The config's learning-rate schedule: the values from its keys, its contradictions, and the line at a job's start."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import job_config
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.schedule import lr_summary, rules_of, schedule_of
from tidegate.lr.progress import EmptyBatch, LrMode, LrRules, OnSkip
from tidegate.lr.schedule import Decay, LrSchedule, WsdDecay


def config_of(tmp_path: Path, actor: dict[str, Any], **schedule: Any) -> JobConfig:
    return job_config(tmp_path, actor={**actor, "lr_schedule": schedule})


def test_by_default_the_rate_is_constant_and_the_budget_is_the_whole_job(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"lr_warm_up_samples": 6})
    assert schedule_of(config) == LrSchedule(1e-3, budget=6, warm_up=Fraction(3, 2))
    assert rules_of(config) == LrRules(4, LrMode.NOMINAL, OnSkip.ADVANCE, EmptyBatch.HOLD, 3)


def test_every_key_of_lr_schedule_sets_its_field(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"max_skipped_updates": 7},
        decay="WSD",
        mode="optimizer_updates",
        budget_updates=20,
        warm_up_updates=5,
        initial=1e-6,
        minimum=1e-5,
        wsd_updates=4,
        wsd_decay="minus_sqrt",
        on_skip="hold",
        empty_batch="advance",
    )
    want = LrSchedule(1e-3, 20, 5, Decay.WSD, 1e-6, 1e-5, 4, WsdDecay.MINUS_SQRT)
    assert schedule_of(config) == want
    assert rules_of(config) == LrRules(4, LrMode.OPTIMIZER_UPDATES, OnSkip.HOLD, EmptyBatch.ADVANCE, 7)


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two warm-ups": (
        {"lr_warm_up_samples": 8},
        {"warm_up_updates": 2},
        "actor.lr_schedule.warm_up_updates=2 and actor.lr_warm_up_samples=8 are one warm-up",
    ),
    "a warm-up as long as the budget": (
        {"lr_warm_up_samples": 24},
        {"decay": "cosine"},
        "actor.lr_schedule: warm_up=6 steps leave nothing of a budget of 6",
    ),
    "an end of another decay": (
        {},
        {"wsd_updates": 2},
        "wsd_updates=2 is the end of the decay WSD, and decay is const",
    ),
    "WSD without its end": ({}, {"decay": "WSD"}, "actor.lr_schedule.wsd_updates=0 must be above 0 and fit the 6 upd"),
    "an end of WSD within the warm-up": (
        {"lr_warm_up_samples": 12},
        {"decay": "WSD", "wsd_updates": 4},
        r"actor.lr_schedule.wsd_updates=4 must be .* fit the 3 updates that follow the warm-up \(budget 6, warm-up 3\)",
    ),
    "WSD within a warm-up as long as the budget": (
        {},
        {"decay": "WSD", "wsd_updates": 1, "warm_up_updates": 6},
        "actor.lr_schedule: warm_up=6 steps leave nothing of a budget of 6",
    ),
    "a minimum above the rate": ({}, {"minimum": 1.0}, "minimum=1.0 must lie between 0 and the peak, 0.001"),
    "no budget": ({}, {"budget_updates": 0}, "actor.lr_schedule.budget_updates=0"),
    "a decay that there is not": ({}, {"decay": "cubic"}, "actor.lr_schedule.decay='cubic'"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_schedule_that_contradicts_itself_is_refused_by_its_keys(case: str, tmp_path: Path) -> None:
    actor, schedule, want = FAULTS[case]
    with pytest.raises(ConfigError, match=want):
        config_of(tmp_path, actor, **schedule)


def test_more_replicas_than_a_minibatch_has_samples_are_refused_by_their_keys(tmp_path: Path) -> None:
    cluster = {"nodes": {"n0": 9}, "component_placement": {"actor": "0-5", "rollout": "6-7", "inference": "8"}}
    refused = (
        "^actor.layout: layout dp6 does not fit: dp=6 replicas cannot share a minibatch of 4 samples .*; use 4 replicas"
    )
    with pytest.raises(ConfigError, match=refused):
        job_config(tmp_path, cluster=cluster, actor={"layout": {"dp": 6}}, inference={"layout": {"dp": 1}})


def test_the_number_of_replicas_changes_nothing_of_the_schedule(tmp_path: Path) -> None:
    layouts = ({"dp": 1, "tp": 2}, {"dp": 2})
    one, two = (config_of(tmp_path, {"lr_warm_up_samples": 6, "layout": layout}, decay="cosine") for layout in layouts)
    assert schedule_of(one) == schedule_of(two)
    assert rules_of(one) == rules_of(two)


def test_the_summary_shows_the_budget_the_shape_and_the_mode(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"lr_warm_up_samples": 8}, decay="cosine", minimum=1e-5)
    assert lr_summary(config) == (
        "learning rate: a budget of 6 updates for the 6 of this job (3 iterations of 2), cosine from 0.001 to 1e-05 "
        "after a warm-up of 2, in mode nominal"
    )


def test_the_summary_shows_a_projected_overshoot(tmp_path: Path) -> None:
    config = config_of(tmp_path, {}, mode="optimizer_updates", budget_updates=4)
    assert lr_summary(config) == (
        "learning rate: a budget of 4 updates for the 6 of this job (3 iterations of 2), constant at 0.001 without "
        "warm-up, in mode optimizer_updates; projected overshoot: 2 updates at 0.001, as before"
    )
    assert config.warnings() == config_of(tmp_path, {}, mode="optimizer_updates").warnings()


def test_an_overshoot_that_lowers_the_rate_is_a_warning(tmp_path: Path) -> None:
    config = config_of(tmp_path, {}, decay="linear", budget_updates=4)
    assert lr_summary(config).endswith("; projected overshoot: 2 updates at the minimum")
    (text,) = (warning for warning in config.warnings() if "actor.lr_schedule" in warning)
    assert text.startswith("actor.lr_schedule.budget_updates=4: the job is projected to pass it by 2 updates, at the")


def test_the_summary_shows_that_a_resume_takes_its_checkpoints_schedule(tmp_path: Path) -> None:
    config = config_of(tmp_path, {}, budget_mismatch="checkpoint")
    assert lr_summary(config).endswith("; a resume goes by its checkpoint's schedule")
