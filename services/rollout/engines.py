"""Which engine a job's config asks for, started on a worker's slot."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import Engine
from services.rollout.sglang.engine import SglangEngine
from services.rollout.sglang.server import ServerSettings
from tidegate.job import Job, JobFolder, engine_scratch
from tidegate.types import GpuId, gpu_index

ENGINE_LOST_STATUS = 71
"""Exit status of a worker whose engine's server died."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """`memory_bytes` is resident, of all that runs for it."""

    engine: Engine
    memory_bytes: int


def start_engine(job: Job, gpu: GpuId) -> StartedEngine:
    """Awake, without weights. Raises EngineFailed."""
    rollout, own_bytes = job.config.rollout, psutil.Process().memory_info().rss
    if rollout.engine == "embedded":
        return StartedEngine(EmbeddedEngine(job.model, max_running_requests=rollout.max_running_requests), own_bytes)
    settings = ServerSettings(
        python=Path(rollout.sglang.python),
        folder=JobFolder.of(job.config).engine(gpu),
        scratch=engine_scratch(job.config, gpu),
        model=job.model,
        device=job.config.cluster.device,
        gpu_index=gpu_index(gpu),
        dtype=rollout.sglang.dtype,
        max_running_requests=rollout.max_running_requests,
        start_timeout_s=rollout.sglang.start_timeout_s,
    )
    engine = SglangEngine(settings, on_death=_end_with_server)
    return StartedEngine(engine, own_bytes + engine.server.memory_bytes)


def _end_with_server(how: str) -> None:
    """At once, whatever the main thread waits for: its service sees the death and what was inside goes to others."""
    print(f"the engine is lost: {how}", file=sys.stderr, flush=True)
    os._exit(ENGINE_LOST_STATUS)
