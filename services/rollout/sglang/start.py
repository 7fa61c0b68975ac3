"""The start of an SGLang server for a worker's slot. A worker whose server dies ends with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from services.rollout.engine import StartedEngine
from services.rollout.sglang.engine import SglangEngine
from services.rollout.sglang.server import ServerSettings
from tidegate.device_slots import slot_device
from tidegate.job import Job, JobFolder, engine_scratch
from tidegate.types import GpuId

ENGINE_LOST_STATUS = 71
"""Exit status of a worker whose engine's server died."""


def start_sglang(job: Job, gpu: GpuId) -> StartedEngine:
    """Raises EngineFailed."""
    rollout, own_bytes = job.config.rollout, psutil.Process().memory_info().rss
    cluster = job.config.cluster
    slot = slot_device(gpu, kind=cluster.device, slots_per_gpu=cluster.slots_per_gpu)
    settings = ServerSettings(
        python=Path(rollout.sglang.python),
        folder=JobFolder.of(job.config).engine(gpu),
        scratch=engine_scratch(job.config, gpu),
        model=job.model,
        device=slot.kind,
        gpu_index=slot.index,
        num_sharing=slot.num_sharing,
        dtype=rollout.sglang.dtype,
        max_running_requests=rollout.max_running_requests,
        start_timeout_s=rollout.sglang.start_timeout_s,
        options=rollout.sglang.options,
        may_rest=bool(rollout.standby) or job.config.scheduler.moves_gpus,
    )
    engine = SglangEngine(settings, on_death=_end_with_server)
    return StartedEngine(engine, own_bytes + engine.server.memory_bytes)


def _end_with_server(how: str) -> None:
    """End at once, whatever the main thread waits for. The service sees the death; others take over the requests."""
    print(f"the engine is lost: {how}", file=sys.stderr, flush=True)
    os._exit(ENGINE_LOST_STATUS)
