"""Times one switch between two layouts by every side, in one tree of rank processes.

All ranks run the sides one after the other, each many times: prepare, meet, switch, floor. After the first and the last
run every element is checked. Caches that are warm in a process stay warm for all later runs. A switch begins when all
ranks are ready, and ends with the last of them. The time leaves `prepare`, `floor` and `check` out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.reshard_dcp import TorchCheckpoint
from benchmarks.reshard_megatron import DistCheckpointing
from benchmarks.reshard_refit import Refit
from benchmarks.reshard_sides import Crew, Side
from benchmarks.reshard_state import LogicalState, Width, model
from benchmarks.reshard_tidegate import ByGloo, BySharedMemory, Foreseen, IntoFreshMemory, WeightsAlone
from tests.ranks import RankContext, Results
from tidegate.elastic.plan.layout import Mesh
from tidegate.types import Layout

SIDES: dict[str, Callable[[Crew, LogicalState], Side]] = {
    "dist_checkpointing": DistCheckpointing,
    "dcp": TorchCheckpoint,
    "mcore_refit": Refit,
    "tidegate": BySharedMemory,
    "tidegate_foreseen": Foreseen,
    "tidegate_fresh": IntoFreshMemory,
    "tidegate_gloo": ByGloo,
    "tidegate_weights": WeightsAlone,
}


def measure_case(
    context: RankContext,
    *,
    source: dict[str, int],
    target: dict[str, int],
    num_layers: int,
    width: str,
    num_runs: dict[str, int],
    folder: str,
) -> Results:
    """`SIDE/began` and `SIDE/ended` on the host's monotonic clock, and `SIDE/PART` in seconds, with one element a run.

    `num_runs`: by side."""
    crew = Crew.of(context, Path(folder))
    state = LogicalState(model(num_layers, width=Width(width)))
    meshes = [
        state.provider.mesh(layout, tuple(range(layout.num_ranks))) for layout in (Layout(**source), Layout(**target))
    ]
    found: Results = {}
    for name, num in num_runs.items():
        side = SIDES[name](crew, state)
        found |= {f"{name}/{key}": np.array(values) for key, values in times_of(crew, side, meshes, num).items()}
        del side
        gc.collect()
    crew.part()
    return found


def times_of(crew: Crew, side: Side, meshes: list[Mesh], num_runs: int) -> dict[str, list[float]]:
    """The side's times as above, without its name."""
    times: dict[str, list[float]] = {}
    for run in range(num_runs):
        side.prepare(*meshes)
        gc.collect()
        crew.meet()
        began = time.monotonic()
        parts = side.switch()
        ended = time.monotonic()
        crew.meet()
        for key, value in {"began": began, "ended": ended, **parts, **side.floor()}.items():
            times.setdefault(key, []).append(value)
        if run in (0, num_runs - 1):
            side.check()
    side.close()
    crew.meet()
    return times
