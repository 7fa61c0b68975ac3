"""Small jobs for tests of plans: a config of sixteen GPUs whose iteration takes minutes of virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.job_scenario import PredictionBasis, basis_of_config, scenario_of
from simulator.planning.starts import placed_only
from simulator.scenario import Scenario
from tests.unit.cli.configs import small
from tidegate.config.job_config import JobConfig, parse_config

PLACEMENT = {"actor": "0-7", "rollout": "8-13", "inference": "14-15"}


def raw_config(tmp_path: Path, **cluster: Any) -> dict[str, Any]:
    raw = small(tmp_path, cluster={"nodes": {"n0": 8, "n1": 8}, "component_placement": PLACEMENT} | cluster)
    raw["model"] |= {"max_seq_len": 4200}
    raw["algorithm"] |= {
        "prompts_per_iteration": 16,
        "group_size": 4,
        "n_minibatches": 2,
        "max_new_tokens": 4000,
        "minibatch_order": "arrival",
    }
    raw["actor"]["layout"], raw["inference"] = {"tp": 2, "dp": 4}, {"layout": {"dp": 2}}
    raw["assumptions"] = {"costs": {"trainer_tokens_per_s": 9000, "trainer_gpus": 16, "trainer_exponent": 0.9}}
    return raw


def job(tmp_path: Path, **cluster: Any) -> JobConfig:
    return parse_config(raw_config(tmp_path, **cluster))


def basis(config: JobConfig) -> PredictionBasis:
    return basis_of_config(config, None)


def scenario(config: JobConfig) -> Scenario:
    return placed_only(scenario_of(config, basis(config)))
