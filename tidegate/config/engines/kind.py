"""What an engine tells about itself before a job starts: faults, warnings, and the environment that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tidegate.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment of the engine's own. `key` is the config key that names its interpreter. `check_version`
    raises ValueError for a version of `package` that cannot be driven."""

    python: str
    key: str
    package: str
    check_version: Callable[[str], None]
    remedy: str


class EngineKind(Protocol):
    def faults(self, *, max_running_requests: int, command_deadline_s: float) -> list[str]:
        """The faults of its settings, one a text."""

    def warnings(self, *, device: str) -> list[str]:
        """Its settings that are legal but rarely intended."""

    def check_model(self, model: ModelConfig) -> None:
        """ValueError, with the remedy, for a model that it cannot serve."""

    def environment(self) -> Environment | None:
        """None for an engine that runs in Tidegate's own environment."""
