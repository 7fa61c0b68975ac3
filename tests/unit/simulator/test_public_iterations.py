"""Whole iterations against publications: the phases of RLinf on 64 to 256 GPUs, and DynaRL's GPU trajectory."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.scenario import Scenario, load_scenario
from tests import effort
from tests.unit.simulator.published_trajectory import DYNAMIC_S, STATIC_ENDS_S, STATIC_S, replayed_s, static_ends

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
ALL_GENERATE = ("cluster.placement={rollout: 0-63, actor: '', inference: ''}", "actor_layout=null")
RLINF_LENGTHS = "lengths.median_tokens=13500"
"""115 to 125 M tokens in 8,192 responses of up to 28.7k."""
SLOW = (
    "physics.decode.host_s=0.0065",
    "physics.trainer.kernel_efficiency=0.46",
    "physics.trainer.update_s=60",
    "physics.trainer.inference_efficiency=0.47",
)
"""Fitted to DynaRL's static iteration: its stack has half of RLinf's throughput in the same nominal job."""
FIT, COMPUTED = "published_64gpu.yaml", "grpo_7b_64gpu.yaml"


def all_generate(file: str, *overrides: str) -> Scenario:
    return load_scenario(SCENARIOS / file, [*ALL_GENERATE, *overrides])


@pytest.mark.parametrize(
    ("num_gpus", "want"),
    effort.cases(
        [(64, (591, 102, 368)), (128, (368, 55, 200)), (256, (236, 30, 112))],
        always=[(64, (591, 102, 368)), (256, (236, 30, 112))],
    ),
    ids=str,
)
def test_the_phases_of_an_iteration_take_what_rlinf_published(num_gpus: int, want: tuple[float, ...]) -> None:
    """RLinf, figure 9: seconds of generation, log-probabilities and training of 7B."""
    nodes = ", ".join(f"n{node}: 8" for node in range(num_gpus // 8))
    cluster = f"cluster.nodes={{{nodes}}}", f"cluster.placement.rollout=0-{num_gpus - 1}"
    rollout_s, inference_s, end_s = static_ends(all_generate(COMPUTED, RLINF_LENGTHS, *cluster), seed=0)
    found = rollout_s, inference_s - rollout_s, end_s - inference_s
    assert found == pytest.approx(want, rel=0.16)
    assert end_s == pytest.approx(sum(want), rel=0.08)


@pytest.mark.parametrize(
    ("file", "overrides", "tolerance"), [(FIT, (), 0.08), (COMPUTED, SLOW, 0.15)], ids=["published_fit", "roofline"]
)
def test_the_published_trajectory_takes_the_published_share_of_the_static_iteration(
    file: str, overrides: tuple[str, ...], tolerance: float
) -> None:
    scenario = all_generate(file, *overrides)
    ends = static_ends(scenario, seed=10)
    assert ends == pytest.approx(STATIC_ENDS_S, rel=0.05)
    assert replayed_s(scenario, seed=10) / ends[-1] == pytest.approx(DYNAMIC_S / STATIC_S, rel=tolerance)
