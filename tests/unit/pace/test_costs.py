"""The costs that a paced job's policy assumes until it has measured its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.state.costs import costs_of, rates_of
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.config.sections.costs import CostsSection
from tidegate.config.sections.pace import PaceSection
from tidegate.pace.costs import SWITCHES
from tidegate.pace.law import PaceLaw
from tidegate.types import Layout

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "paced.yaml"


def raw_config() -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return raw


@given(
    sequences=st.integers(1, 64), kv_tokens=st.integers(0, 20_000), tokens=st.integers(1, 10**6), dp=st.integers(1, 8)
)
def test_a_policy_foresees_each_step_as_the_law_has_it(sequences: int, kv_tokens: int, tokens: int, dp: int) -> None:
    config = parse_config(raw_config())
    assert config.cluster.pace is not None
    law, section = PaceLaw(config.cluster.pace), config.assumptions.costs
    costs, rates = costs_of(section, gpus_per_host=8), rates_of(section, num_gpus=8)
    decode_s = costs.decode.seconds(num_running=sequences, num_kv_tokens=kv_tokens)
    assert decode_s == pytest.approx(law.decode_s(num_sequences=sequences, num_kv_tokens=kv_tokens))
    assert tokens / costs.prefill_tokens_per_s == pytest.approx(law.prefill_s(tokens))
    update_s = costs.update_s + tokens * dp / section.trainer_rate(dp)
    assert update_s == pytest.approx(law.training_s([[tokens]] * dp, Layout(dp=dp)))
    assert tokens / rates.inference_tokens_per_s_per_gpu == pytest.approx(law.scoring_s(tokens, Layout()))


def test_a_kl_term_doubles_the_time_that_a_policy_assumes_of_scoring() -> None:
    raw = raw_config()
    plain = parse_config(raw).assumptions.costs
    raw["algorithm"]["kl_coefficient"] = 0.1
    with_kl = parse_config(raw).assumptions.costs
    assert with_kl.inference_tokens_per_s == pytest.approx(plain.inference_tokens_per_s / 2)


def test_what_the_config_sets_stays_though_it_is_the_default_of_a_job_without_pace() -> None:
    raw = raw_config()
    default = CostsSection()
    raw["assumptions"] = {"costs": {"reshard_s": default.reshard_s, "update_s": default.update_s}}
    costs = parse_config(raw).assumptions.costs
    assert (costs.reshard_s, costs.update_s) == (default.reshard_s, default.update_s)
    assert costs.load_s == SWITCHES["load_s"] != default.load_s


def test_a_config_that_was_written_and_read_again_has_the_same_costs() -> None:
    config = parse_config(raw_config())
    again = JobConfig.from_json(config.to_json())
    assert again.assumptions == config.assumptions


def test_a_job_without_pace_keeps_the_defaults() -> None:
    raw = raw_config()
    del raw["cluster"]["pace"]
    assert parse_config(raw).assumptions.costs == CostsSection()


def test_the_largest_and_the_smallest_pace_give_costs_that_a_config_may_have() -> None:
    for changes in ({"time_scale": 1e-6}, {"time_scale": 1e6, "tokens_per_token": 4096}):
        raw = raw_config()
        raw["cluster"]["pace"] = PaceSection.model_validate(changes).model_dump(mode="json")
        JobConfig.from_json(parse_config(raw).to_json())
