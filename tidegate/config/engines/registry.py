"""The engines that a config can name: the section on the rollout, and what makes an engine's kind of it.

`services.rollout.engines` starts an engine of each name. [test_engine_registry: every_engine_of_the_config]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tidegate.config.base import GpuList, Positive, Section
from tidegate.config.engines.embedded import Embedded
from tidegate.config.engines.kind import EngineKind
from tidegate.config.engines.length_law import LengthLawSection
from tidegate.config.engines.sglang import SglangSection


class RolloutSection(Section):
    """Generation, with one engine a GPU."""

    max_running_requests: Positive = 32
    num_reward_workers: Positive = 2
    """Processes that compute the rewards of `data`. A built-in task needs none."""
    standby: GpuList = ""
    """GPUs that the rollout may get besides those of its placement, in the notation of the placement. A policy that
    moves GPUs may give it any GPU of the job; then this may stay empty."""
    standby_memory_mib: Positive = 2048
    """The memory limit of a process that stands by on a slot for the rollout. A process that takes more is ended, and
    its slot starts cold."""
    engine: Literal["embedded", "sglang"] = "embedded"
    sglang: SglangSection = SglangSection()
    length_law: LengthLawSection | None = None
    """For benchmarks only: draws the length of each response. None: a response ends where the model ends it."""


KINDS: Mapping[str, Callable[[RolloutSection], EngineKind]] = {
    "embedded": lambda rollout: Embedded(),
    "sglang": lambda rollout: rollout.sglang,
}

DECIDES_SAMPLES: Mapping[str, tuple[str, ...]] = {"sglang": ("dtype",)}
"""The keys of engines' own sections on which the samples depend."""


def kind_of(rollout: RolloutSection) -> EngineKind:
    """The kind of the engine that the section names."""
    return KINDS[rollout.engine](rollout)


def deciding(rollout: RolloutSection) -> dict[str, Any]:
    """The values of the section on which the samples depend. Keys of other engines are None."""
    law = rollout.length_law
    found: dict[str, Any] = {"engine": rollout.engine, "length_law": law.model_dump(mode="json") if law else None}
    for engine, keys in DECIDES_SAMPLES.items():
        section = getattr(rollout, engine).model_dump(mode="json")
        found[engine] = {key: section[key] if engine == rollout.engine else None for key in keys}
    return found
