"""The engines by name, as a config names them, and the start of one on a worker's slot.

The names are those of `tidegate.config.engines.registry`. [test_engine_registry: every_engine_of_the_config]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.rollout.embedded.start import start_embedded
from services.rollout.engine import StartedEngine
from services.rollout.sglang.start import start_sglang
from tidegate.config.job_config import JobConfig
from tidegate.job import Job
from tidegate.runtime.pacer import Pacer
from tidegate.types import GpuId

STARTS: Mapping[str, Callable[[Job, GpuId, Pacer], StartedEngine]] = {
    "embedded": start_embedded,
    # The config refuses a pace for its servers.
    "sglang": lambda job, gpu, pacer: start_sglang(job, gpu),
}

STARTS_ASLEEP: Mapping[str, frozenset[str]] = {"embedded": frozenset({"cpu", "cuda"}), "sglang": frozenset({"cpu"})}
"""The devices on which an engine may be started to stand by, by engine.

A starting SGLang server takes the memory of its GPU, which another component holds then. So on CUDA only an engine that
was at work stands by with its server; before, its worker has its process and its imports."""


def starts_asleep(config: JobConfig) -> bool:
    """Whether an engine is started to stand by."""
    return config.cluster.device in STARTS_ASLEEP[config.rollout.engine]


def start_engine(job: Job, gpu: GpuId, pacer: Pacer) -> StartedEngine:
    """An engine that is awake and has no weights yet. Raises EngineFailed."""
    return STARTS[job.config.rollout.engine](job, gpu, pacer)
