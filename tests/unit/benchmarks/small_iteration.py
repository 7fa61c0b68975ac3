"""A small iteration under either law of physics, as overrides of a scenario on 64 GPUs."""

from __future__ import annotations

SMALL = (
    "cluster.nodes={n0: 8, n1: 8}",
    "cluster.placement={actor: 0-3, rollout: 4-13, inference: 14-15}",
    "actor_layout.tp=4",
    "actor_layout.dp=1",
    "algorithm.prompts_per_iteration=16",
    "algorithm.group_size=4",
    "algorithm.n_minibatches=2",
    "lengths.median_tokens=700",
    "lengths.max_tokens=3000",
)
