"""A small job's valid config, the same with another value, and on data."""

from __future__ import annotations

import copy
from typing import Any

VALID: dict[str, Any] = {
    "job": "try",
    "cluster": {
        "nodes": {"n0": 3, "n1": 2},
        "component_placement": {"actor": "0-1", "rollout": "2,3", "inference": 4},
    },
    "model": {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_seq_len": 64,
    },
    "task": {"name": "count"},
    "algorithm": {
        "iterations": 2,
        "prompts_per_iteration": 4,
        "group_size": 2,
        "n_minibatches": 2,
        "max_new_tokens": 16,
    },
    "actor": {"layout": {"dp": 2}, "learning_rate": 1e-3, "warm_up": {"steps": 1}},
}


def valid_with(path: str, value: object) -> dict[str, Any]:
    raw = copy.deepcopy(VALID)
    section = raw
    *parents, key = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return raw


DATA = {"train": "train.jsonl", "answer_key": "answer"}
REWARDS = [{"name": "exact_match"}]


def on_data(**changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(VALID)
    raw["model"]["tokenizer"] = "words.json"
    raw["actor"]["warm_up"] = {"steps": 0}
    return {**raw, "task": None, "data": DATA, "rewards": REWARDS, **changes}
