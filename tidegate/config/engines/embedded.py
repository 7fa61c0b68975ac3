"""The embedded engine, in the worker's process. It has no keys of its own."""

from __future__ import annotations

from tidegate.config.engines.kind import Environment
from tidegate.model_config import ModelConfig

MAX_RUNNING_REQUESTS = 256
"""The most requests that an embedded engine runs at once.

It is the largest batch for which the engine's `probe` checks that rows repeat bit for bit.
"""


class Embedded:
    def faults(self, *, max_running_requests: int, command_deadline_s: float) -> list[str]:
        if max_running_requests <= MAX_RUNNING_REQUESTS:
            return []
        return [
            f"rollout.max_running_requests={max_running_requests} is more than an embedded engine generates at "
            f"once: lower it to {MAX_RUNNING_REQUESTS} or less, and give the rollout more GPUs for more"
        ]

    def warnings(self, *, device: str) -> list[str]:
        return []

    def check_model(self, model: ModelConfig) -> None:
        """It serves every model that the actor trains."""

    def environment(self) -> Environment | None:
        return None
