"""A worker whose engine does not start refuses the call with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rollout.engine import EngineFailed
from services.rollout.sglang.server import ServerSettings, SglangServer
from services.rollout.worker import EngineWorker
from tests.unit.cli.configs import small_config
from tests.unit.rollout.tiny_models import TINY
from tidegate.runtime.worker import CallRefused
from tidegate.types import GpuId
from tidegate.v1 import workers_pb2 as wire


@pytest.mark.parametrize(("end", "want"), [("exit 3", []), ("kill -9 $$", ["SGLang's server ended with signal 9"])])
def test_a_server_that_is_killed_while_it_starts_died_and_one_that_ends_did_not_start(
    end: str, want: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{end}\n")
    python.chmod(0o755)
    settings = ServerSettings(
        python=python,
        folder=tmp_path / "engine",
        scratch=tmp_path / "scratch",
        model=TINY,
        device="cpu",
        gpu_index=0,
        dtype="float32",
        max_running_requests=3,
        start_timeout_s=60.0,
    )
    deaths: list[str] = []
    with pytest.raises(EngineFailed, match="SGLang's server ended with"):
        SglangServer(settings, on_death=deaths.append)
    assert [how.partition(";")[0] for how in deaths] == want


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
