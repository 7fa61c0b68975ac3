"""A worker whose engine does not start refuses the call with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rollout.worker import EngineWorker
from tests.unit.cli.configs import small_config
from tidegate.runtime.worker import CallRefused
from tidegate.types import GpuId
from tidegate.v1 import workers_pb2 as wire


def test_an_engine_that_does_not_start_is_reported_with_its_end_and_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    python.chmod(0o755)
    config = small_config(tmp_path, rollout={"engine": "sglang", "sglang": {"python": str(python)}})
    call = wire.WorkerCall(start_engine=wire.StartEngine(config_json=config.to_json()))
    with pytest.raises(CallRefused, match=r"^SGLang's server ended with status 3; its log is (.*/sglang\.log)$"):
        list(EngineWorker(GpuId("n0/1")).handle(call))
    (log,) = tmp_path.rglob("sglang.log")
    assert log.read_text() == "no memory left\n"
