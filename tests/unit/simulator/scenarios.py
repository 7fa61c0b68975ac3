"""Scenarios that several tests of the simulator share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.scenario import Scenario, load_scenario, parse_scenario

PUBLISHED = Path(__file__).parents[3] / "examples/scenarios/published_64gpu.yaml"
SMALL: dict[str, Any] = {
    "physics": {"law": "published_fit"},
    "cluster": {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6-7"}},
    "algorithm": {"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 2},
    "lengths": {"median_tokens": 800, "max_tokens": 4000},
    "costs": {"engine": {"max_running": 16, "kv_capacity_tokens": 20_000}, "trainer": {"rate_gpus": 8}},
}
STEP_BY_BATCH = (
    "costs.engine.step_floor_s=0",
    "costs.engine.step_base_s=0.006",
    "costs.engine.step_per_sequence_s=6e-5",
)
"""6 to 14 ms. With the fitted step of 14.1 ms at every batch a tail costs most, and its end gains most."""


def small(**changes: object) -> Scenario:
    return parse_scenario({**SMALL, **changes})


def published(num_gpus: int, *words: str) -> Scenario:
    """Engines, trainer and moves of the 7B job, on fewer GPUs."""
    nodes = ", ".join(f"n{node}: 8" for node in range(num_gpus // 8))
    placement = f"actor: 0-3, rollout: 4-{num_gpus - 3}, inference: {num_gpus - 2}-{num_gpus - 1}"
    cluster = (f"cluster.nodes={{{nodes}}}", f"cluster.placement={{{placement}}}", "actor_layout.dp=1")
    return load_scenario(PUBLISHED, [*cluster, "algorithm.n_minibatches=1", *STEP_BY_BATCH, *words])
