"""The scenario of the tests of asynchronous trainings: 16 GPUs, and a split that is far from the best."""

from __future__ import annotations

from typing import Any

RAW: dict[str, Any] = {
    "name": "async",
    "physics": {"law": "published_fit"},
    "cluster": {"nodes": {"n0": 8, "n1": 8}, "placement": {"actor": "0-7", "inference": "8-9", "rollout": "10-15"}},
    "algorithm": {"prompts_per_iteration": 16, "group_size": 4, "n_minibatches": 2},
    "lengths": {"median_tokens": 400, "max_tokens": 4000},
    "costs": {
        "engine": {"gpus_per_engine": 1, "max_running": 8, "step_floor_s": 0.01},
        "trainer": {"rate_tokens_per_s": 6000, "rate_gpus": 16, "exponent": 0.8, "fixed_s": 0.5},
        "inference": {"rate_tokens_per_s": 8000},
        "switch": {"release_s": 0.2, "acquire_s": 0.2, "resubmit_s": 0.1, "reshard_s": 0.1},
        "sync": {"fixed_s": 0.5},
    },
}
