"""Computed times for a job's own model, and what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.job_scenario import scenario_of, with_config_keys
from simulator.physics.hardware import GpuName
from simulator.physics.shapes import SHAPES, ModelName
from simulator.planning.hardware import basis_of_hardware, gpu_named, memory_of_job, notes, shape_of
from simulator.planning.needs import Need, needs_of, spare_slots
from simulator.scenario import ScenarioError
from tests.unit.simulator.plans import job, raw_config
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

SEVEN_B = SHAPES[ModelName.QWEN25_7B]


def bf16(tmp_path: Path, **actor: Any) -> JobConfig:
    raw = raw_config(tmp_path)
    raw["actor"] |= {"precision": "bf16", "recompute": "full"} | actor
    return parse_config(raw)


def test_the_shape_of_a_job_is_that_of_its_model() -> None:
    model = ModelConfig(
        num_layers=28,
        hidden_size=3584,
        ffn_hidden_size=18_944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_665,
        max_seq_len=4096,
        qkv_bias=True,
    )
    assert shape_of(model, 152_064) == SEVEN_B


def test_times_are_computed_for_the_jobs_layout_and_micro_batches(tmp_path: Path) -> None:
    config = bf16(tmp_path, max_tokens_per_microbatch=8192)
    known = basis_of_hardware(config, SEVEN_B, GpuName.H200, prompt_tokens=100)
    scenario = scenario_of(config, known)
    assert scenario.is_computed
    assert scenario.laws().engine.kv_capacity_tokens == memory_of_job(config, SEVEN_B, GpuName.H200, 100).cache_tokens(
        1
    )
    assert (scenario.physics.trainer.micro_batch_tokens, scenario.physics.trainer.recompute) == (8192, True)


def test_a_move_that_the_config_times_counts_and_a_rate_does_not(tmp_path: Path) -> None:
    raw = raw_config(tmp_path)
    raw["assumptions"] = {"costs": {"acquire_s": 9.5, "update_s": 1.0}}
    raw["actor"] |= {"precision": "bf16", "recompute": "full"}
    config = parse_config(raw)
    laws = scenario_of(config, basis_of_hardware(config, SEVEN_B, GpuName.H100, prompt_tokens=100)).laws()
    assert laws.switch.acquire_s == 9.5
    assert laws.switch.release_s == 2.0
    assert laws.trainer.update_s(Layout(tp=2, dp=4)) > 6.0


def test_keys_that_do_not_count_are_named(tmp_path: Path) -> None:
    found = [*notes(job(tmp_path))]
    assert "times are those of bf16, and actor.precision is fp32" in found
    assert (
        "not used, for the physics compute them: assumptions.costs.trainer_exponent, assumptions.costs.trainer_gpus, "
        "assumptions.costs.trainer_tokens_per_s"
    ) in found


def test_an_engine_without_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    big = SHAPES[ModelName.QWEN25_32B].model_copy(update={"num_layers": 70})
    with pytest.raises(ScenarioError, match=r"--hardware H100: an engine of a job has one GPU, with 68.0 GB for wei"):
        basis_of_hardware(bf16(tmp_path), big, GpuName.H100, prompt_tokens=100)


def test_a_layout_without_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = bf16(tmp_path)
    known = basis_of_hardware(config, SHAPES[ModelName.QWEN25_32B], GpuName.H200, prompt_tokens=100)
    with pytest.raises(ScenarioError) as refused:
        scenario_of(config, known)
    (line,) = with_config_keys(str(refused.value)).splitlines()
    assert line.startswith("actor.layout.tp=2, pp=1, dp=4 has no room for the model: layout tp2-dp4 needs ")
    assert line.endswith("raise tp, pp or dp, or lower actor.max_tokens_per_microbatch")


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--hardware 'H10' is no known GPU; the nearest is 'H100' \(known: H100, "):
        gpu_named("H10")


def test_a_pace_is_refused(tmp_path: Path) -> None:
    raw = raw_config(tmp_path)
    raw["cluster"]["pace"] = {"cores_per_slot": 0.01}
    with pytest.raises(ScenarioError, match=r"--hardware H100 and cluster\.pace are two laws"):
        basis_of_hardware(parse_config(raw), SEVEN_B, GpuName.H100, prompt_tokens=100)


def by_name(needs: list[Need]) -> dict[str, Need]:
    return {each.what: each for each in needs}


def test_a_7b_job_needs_its_published_sizes(tmp_path: Path) -> None:
    config, layout = bf16(tmp_path), Layout(tp=2, dp=4)
    memory = memory_of_job(config, SEVEN_B, GpuName.H100, 100)
    needs = by_name(needs_of(config, memory, layout, unknown="", is_gpu_named=True))
    weights = needs["weights of an engine"].size_bytes
    assert weights == pytest.approx(15.2e9, rel=0.01)
    assert needs["snapshots"].size_bytes == 2 * SEVEN_B.weight_bytes
    assert needs["trainer"].size_bytes == memory.of_trainer(layout).total
    assert needs["processes on standby"].size_bytes == 8 * 3 * 2048 * 2**20
    assert "fits on the GPU of 80 GB" in needs["both at once, without a cache"].note


def test_without_a_shape_what_is_not_known_is_named(tmp_path: Path) -> None:
    needs = needs_of(job(tmp_path), None, Layout(), unknown="no checkpoint", is_gpu_named=False)
    assert needs[0].size_bytes is None
    assert needs[0].note == "the model's shape is not known: no checkpoint"
    assert spare_slots(job(tmp_path)) == 0
