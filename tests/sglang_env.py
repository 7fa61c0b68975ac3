"""The tests' SGLang: where it is, how they start it and how they slow it down."""

from __future__ import annotations

import os
from pathlib import Path

from services.rollout.sglang.engine import SglangEngine
from services.rollout.sglang.server import ServerSettings
from tests.unit.rollout.tiny_models import TINY
from tidegate.model_config import ModelConfig

STEP_S = 0.005
"""A server sleeps this long in each step, so that 100 tokens outlast the other steps of a test."""


def sglang_python() -> Path:
    """The interpreter that `make test-sglang` names."""
    return Path(os.environ["SGLANG_PYTHON"])


def settings_in(folder: Path, *, model: ModelConfig = TINY) -> ServerSettings:
    return ServerSettings(
        python=sglang_python(),
        folder=folder,
        scratch=folder / "scratch",
        model=model,
        device="cpu",
        gpu_index=0,
        dtype="float32",
        max_running_requests=3,
        start_timeout_s=250.0,
    )


def slowed_down(engine: SglangEngine) -> None:
    """Uses an endpoint that the server has for tests."""
    engine.server.client.post("/slow_down", {"forward_sleep_time": STEP_S}, timeout_s=10.0)
