"""The start of an embedded engine in a worker's process."""

from __future__ import annotations

import psutil

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import StartedEngine
from tidegate.job import Job
from tidegate.types import GpuId


def start_embedded(job: Job, gpu: GpuId) -> StartedEngine:
    own_bytes = psutil.Process().memory_info().rss
    engine = EmbeddedEngine(job.model, max_running_requests=job.config.rollout.max_running_requests)
    return StartedEngine(engine, own_bytes)
