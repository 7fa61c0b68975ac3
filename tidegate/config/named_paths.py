"""The files and folders that a config names for a job's processes, wherever they run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidegate.config.base import ITEM, FileName, fields_of
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.data import RewardName

_OF_THE_LAUNCHER = {"cluster", "runtime", "servers"}
"""Sections whose files are its own, or travel with the job."""
_COPIED = ("model", "tokenizer")
"""Its copy is in the job's folder."""


def named_paths(config: JobConfig) -> dict[str, str]:
    """Absolute paths by key, for those that the config has: `{"model.path": "/data/qwen"}`."""
    found: dict[str, str] = {}
    values = config.model_dump(mode="json")
    for path, field in fields_of(JobConfig):
        names = [mark for mark in field.metadata if isinstance(mark, FileName)]
        if names and path[0] not in _OF_THE_LAUNCHER and path != _COPIED:
            found |= {key: text for key, text in _at(values, path) if text and text not in names[0].other_than}
    for number, reward in enumerate(config.rewards):
        module = reward.path.rpartition(":")[0]
        if reward.name is RewardName.FUNCTION and module.startswith("/"):
            found[f"rewards.{number}.path"] = module
    return found


def _at(values: Any, path: tuple[str, ...], key: str = "") -> Iterator[tuple[str, str]]:
    """The texts at a path, each with its key."""
    if values is None:
        return
    if not path:
        yield key, values
    elif path[0] == ITEM:
        for number, item in enumerate(values):
            yield from _at(item, path[1:], f"{key}.{number}")
    else:
        yield from _at(values[path[0]], path[1:], f"{key}.{path[0]}" if key else path[0])
