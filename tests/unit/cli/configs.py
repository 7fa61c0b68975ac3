"""A small, valid config, for tests of what goes wrong around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tidegate.config.job_config import JobConfig, parse_config


def small(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """All its paths are under `tmp_path`, host memory too."""
    (tmp_path / "memory").mkdir(exist_ok=True)
    raw: dict[str, Any] = {
        "job": "small",
        "output_dir": str(tmp_path / "jobs"),
        "cluster": {"nodes": {"n0": 3}, "component_placement": {"actor": 0, "rollout": 1, "inference": 2}},
        "model": {
            "num_layers": 2,
            "hidden_size": 16,
            "ffn_hidden_size": 32,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_seq_len": 80,
        },
        "task": {"name": "countdown"},
        "algorithm": {"iterations": 2, "prompts_per_iteration": 2, "group_size": 2, "max_new_tokens": 60},
        "actor": {"learning_rate": 1e-3},
        "runtime": {"host_memory_root": str(tmp_path / "memory")},
    }
    return raw | changes


def small_over_two_machines(tmp_path: Path) -> dict[str, Any]:
    """Its node n1 is on machine b."""
    raw = small(tmp_path)
    raw["cluster"] = {
        "nodes": {"n0": 2, "n1": 1},
        "component_placement": {"actor": 0, "rollout": 1, "inference": 2},
        "addresses": {"n0": "127.0.0.2", "n1": "127.0.0.3"},
        "machines": [{"name": "b", "agent": "127.0.0.3:7400", "nodes": ["n1"]}],
        "machine_credentials": str(tmp_path),
    }
    raw["runtime"]["gate_root"] = str(tmp_path / "gates")
    return raw


def small_config(tmp_path: Path, **changes: Any) -> JobConfig:
    return parse_config(small(tmp_path, **changes))


def small_file(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small(tmp_path, **changes)))
    return path
