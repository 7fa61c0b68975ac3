"""A config that is valid, and may not do what its author wants, is a warning with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.valid_config import DATA, VALID, on_data, valid_with
from tidegate.config.files import load_config
from tidegate.config.job_config import parse_config


def test_a_top_p_that_biases_the_update_is_a_warning_with_the_remedy() -> None:
    (warning,) = parse_config(valid_with("algorithm.top_p", 0.9)).warnings()
    assert warning.startswith("algorithm.top_p=0.9: ")
    assert "the update is biased; set it to 1" in warning
    assert parse_config(VALID).warnings() == ()


def test_an_importance_cap_without_effect_is_a_warning() -> None:
    raw = valid_with("algorithm.importance_cap", 2.0)
    assert parse_config(raw).warnings() == ()
    raw["algorithm"]["old_logprobs"] = "engine"
    (warning,) = parse_config(raw).warnings()
    assert warning.startswith("algorithm.importance_cap=2 corrects nothing with old_logprobs: engine")


def test_a_model_with_random_weights_is_a_warning_with_the_remedy() -> None:
    (warning,) = parse_config(valid_with("actor.warm_up.steps", 0)).warnings()
    assert warning.startswith("actor.warm_up.steps=0: ")
    assert "learns only where random responses earn some reward" in warning
    assert "set it to 200" in warning


def test_an_engine_that_takes_no_seeds_is_a_warning_that_names_one_that_does() -> None:
    sglang = {"engine": "sglang", "sglang": {"python": "bin/python"}}
    (warning,) = parse_config(valid_with("rollout", sglang)).warnings()
    assert warning.startswith("rollout.engine=sglang samples without seeds on a CPU")
    assert "set it to embedded" in warning


def test_gpus_that_no_component_uses_are_a_warning() -> None:
    (warning,) = parse_config(valid_with("cluster.nodes", {"n0": 3, "n1": 4})).warnings()
    assert "leaves 2 of 7 GPUs to no component: 5 (n1/2), 6 (n1/3);" in warning


@pytest.mark.parametrize(
    ("train", "changes", "remedy"),
    [
        ("all.jsonl", {"data": "all.jsonl"}, "name a file whose prompts are not trained on"),
        ("all.parquet", {"data": "more/../all.parquet", "split": "other"}, "name a file"),
        ("folder", {"data": "folder/", "split": "train"}, "name another split"),
    ],
    ids=["the same file", "the same file otherwise written", "the same split of a folder"],
)
def test_an_evaluation_on_what_the_job_trains_on_is_a_warning(train: str, changes: dict[str, Any], remedy: str) -> None:
    raw = on_data(data={**DATA, "train": train}, evaluation={"every": 2, "num_prompts": 4, **changes})
    (warning,) = (each for each in parse_config(raw).warnings() if "evaluation" in each)
    assert warning.startswith(f"evaluation.data={changes['data']} is data.train: the first 4 prompts of the evaluation")
    assert remedy in warning


@pytest.mark.parametrize(
    ("train", "evaluated"), [("folder", "folder"), ("a.jsonl", "b.jsonl")], ids=["another split", "another file"]
)
def test_an_evaluation_on_other_data_is_no_warning(train: str, evaluated: str) -> None:
    raw = on_data(data={**DATA, "train": train}, evaluation={"every": 2, "data": evaluated})
    assert not [each for each in parse_config(raw).warnings() if "evaluation" in each]


def test_the_example_config_has_no_warnings() -> None:
    assert load_config(Path(__file__).resolve().parents[3] / "examples" / "grpo.yaml").warnings() == ()
