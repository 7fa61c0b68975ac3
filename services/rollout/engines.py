"""The engines by name, as a config names them, and the start of one on a worker's slot.

The names are those of `tidegate.config.engines.registry`. [test_engine_registry: every_engine_of_the_config]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.rollout.embedded.start import start_embedded
from services.rollout.engine import StartedEngine
from services.rollout.sglang.start import start_sglang
from tidegate.job import Job
from tidegate.runtime.pacer import Pacer
from tidegate.types import GpuId

STARTS: Mapping[str, Callable[[Job, GpuId, Pacer], StartedEngine]] = {
    "embedded": start_embedded,
    # The config refuses a pace for its servers.
    "sglang": lambda job, gpu, pacer: start_sglang(job, gpu),
}

WARM_ASLEEP = frozenset({"embedded"})
"""The engines that sleep in memory and wake within milliseconds. A sleeping SGLang engine has no server, so a worker
that stands by for one has only its process and its imports."""


def start_engine(job: Job, gpu: GpuId, pacer: Pacer) -> StartedEngine:
    """An engine that is awake and has no weights yet. Raises EngineFailed."""
    return STARTS[job.config.rollout.engine](job, gpu, pacer)
