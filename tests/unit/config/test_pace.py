"""What a config says of modelled slots and drawn lengths is refused before anything starts, with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.configs import small
from tidegate.config.checks.pace import budget_fault
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.sections.job import ClusterSection
from tidegate.launcher.claim import Start
from tidegate.launcher.run import RunRequest, check_job
from tidegate.runtime.cores import num_cores

LAW = {"median_tokens": 10}


def config_of(tmp_path: Path, *, cluster: dict[str, Any] | None = None, **changes: Any) -> JobConfig:
    raw = small(tmp_path, **changes)
    raw["cluster"] |= cluster or {}
    return parse_config(raw)


def cluster_of(tmp_path: Path, **pace: Any) -> ClusterSection:
    """Three slots."""
    return config_of(tmp_path, cluster={"pace": pace}).cluster


def test_budgets_over_the_share_of_the_cores_are_refused_with_what_would_fit(tmp_path: Path) -> None:
    fault = budget_fault(cluster_of(tmp_path, cores_per_slot=0.5), num_cores=2.0)
    assert fault == (
        "cluster.pace.cores_per_slot=0.5 gives 3 slots 1.50 cores, more than 70% of the 2 cores here (1.40): lower it "
        "to 0.467 or less and raise cluster.pace.time_scale as much, or name at most 2 slots in cluster.nodes"
    )


def test_budgets_within_the_share_are_taken(tmp_path: Path) -> None:
    assert budget_fault(cluster_of(tmp_path, cores_per_slot=0.466), num_cores=2.0) is None
    assert budget_fault(config_of(tmp_path).cluster, num_cores=0.01) is None, "without a pace there is no budget"


async def test_a_start_is_refused_when_the_budgets_do_not_fit_this_machine(tmp_path: Path) -> None:
    config = config_of(tmp_path, cluster={"pace": {"cores_per_slot": 1e6}})
    with pytest.raises(ConfigError, match=r"cores_per_slot=1e\+06 gives 3 slots 3000000.00 cores, more than 70%"):
        await check_job(RunRequest(config, Start.FRESH, "resume", "fresh"))
    assert not (tmp_path / "jobs").exists()


def test_a_quota_limits_the_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert num_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_cores(tmp_path) == num_cores(tmp_path / "none") >= 1


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"cluster": {"pace": {}, "device": "cuda"}}, "cluster.pace models the speed of CPU slots"),
        (
            {"cluster": {"pace": {}}, "rollout": {"engine": "sglang", "sglang": {"python": "python"}}},
            "cluster.pace cannot slow down the steps of rollout.engine=sglang",
        ),
        (
            {"rollout": {"engine": "sglang", "sglang": {"python": "python"}, "length_law": LAW}},
            "rollout.length_law needs an engine that ends a response at its length",
        ),
        ({"cluster": {"pace": {"time_scale": 0}}}, "cluster.pace.time_scale"),
        ({"cluster": {"pace": {"train_mfu": 1.5}}}, "cluster.pace.train_mfu"),
        ({"cluster": {"pace": {"parameter": 7e9}}}, "parameters"),
    ],
)
def test_a_pace_or_a_length_law_that_cannot_hold_is_refused(tmp_path: Path, changes: Any, want: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **changes)
    assert want in str(refused.value)


def test_a_length_law_is_refused_where_its_responses_are_left_out_of_the_loss(tmp_path: Path) -> None:
    raw = small(tmp_path, rollout={"length_law": LAW})
    raw["algorithm"]["mask_truncated"] = True
    with pytest.raises(ConfigError, match="leaves every response of rollout"):
        parse_config(raw)


def test_a_length_law_is_told_as_a_benchmarks(tmp_path: Path) -> None:
    assert any("for benchmarks" in line for line in config_of(tmp_path, rollout={"length_law": LAW}).warnings())
