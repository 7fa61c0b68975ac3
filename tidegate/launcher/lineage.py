"""What a resumed run may not change: everything that decides a job's samples and weights. Pure.

Invariant: a resume may have more iterations and other GPUs, and nothing else.
[test_claim: resumed_run_may_have_more_iterations]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tidegate.config.engines.registry import deciding
from tidegate.config.job_config import JobConfig
from tidegate.config.schedule import leave_out_schedule
from tidegate.config.sections.lr import RESUME_KEYS
from tidegate.lr.checkpoint import OnMismatch

_DECIDES_SAMPLES = ("seed", "model", "task", "data", "rewards", "algorithm", "actor")
"""Sections that a resumed run may not change: its samples and weights would differ from those of an unbroken run."""

_MAY_CHANGE = {
    "algorithm": ("iterations",),
    "actor": (
        "layout",
        "layouts",
        "standby",
        "standby_memory_mib",
        "layouts_ahead_mib",
        "recompute",
        "copies",
        "micro_batch_size",
        "max_tokens_per_microbatch",
        "oversize_samples",
        "packing",
        "max_skipped_updates",
    ),
}
"""Keys of these sections that a resumed run may change: how long the job trains, and where and in what portions. The
portions change a result by its rounding only."""


def changes_of_samples(saved: JobConfig, config: JobConfig) -> list[str]:
    """Each key that decides the samples and differs from the job's last start, as `key=new (was old)`."""
    before, after = _deciding(saved), _deciding(config)
    if config.actor.lr_schedule.budget_mismatch is not OnMismatch.ERROR:
        # The config says which schedule holds, and the actor applies that.
        for found in (before, after):
            leave_out_schedule(found["actor"])
    return list(_differences(before, after))


def _deciding(config: JobConfig) -> dict[str, Any]:
    """The values that decide samples and weights. Of the rollout: the engine that draws the samples.

    The tokenizer is the folder's own after the first start. Data may lie elsewhere under the same checksum. The limit
    on failed rewards only ends a job.
    """
    dumped = {
        section: value for section, value in config.model_dump(mode="json").items() if section in _DECIDES_SAMPLES
    }
    del dumped["model"]["tokenizer"]
    for section, keys in _MAY_CHANGE.items():
        for key in keys:
            del dumped[section][key]
    for key in RESUME_KEYS:
        del dumped["actor"]["lr_schedule"][key]
    if dumped["data"] is not None:
        del dumped["data"]["train"], dumped["data"]["chat_template"]
    for reward in dumped["rewards"]:
        del reward["import_from"], reward["max_failed"]
        # A file may lie elsewhere, as the module of a function may.
        reward["path"] = reward["path"].rpartition("/")[2]
    return dumped | {"rollout": deciding(config.rollout)}


def _differences(before: dict[str, Any], after: dict[str, Any], where: str = "") -> Iterator[str]:
    """An item of a list has its place as its key. Lists of other lengths differ as a whole."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            old, new = ({str(place): item for place, item in enumerate(items)} for items in (old, new))
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{where}{key}.")
        elif old != new:
            yield f"{where}{key}={_as_yaml(new)} (was {_as_yaml(old)})"


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
