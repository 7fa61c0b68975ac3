"""The ranks of the reshard part. Each computes the state's values on its own device, so no fill crosses the bus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.reshard_dcp import TorchCheckpoint
from benchmarks.reshard_ranks import times_of
from benchmarks.reshard_sides import Crew
from benchmarks.reshard_state import LogicalState, Width, model
from benchmarks.reshard_tidegate import ByGloo
from tests.ranks import RankContext, Results
from tidegate.types import Layout


class OnOneDevice(ByGloo):
    """It has no floor: that would take the memory of another copy of everything that moves."""

    moved_bytes = 0

    def switch(self) -> dict[str, float]:
        done = self._trainer.reshard(self._target.layout)
        assert done.certificate, "the certificate is on"
        self.moved_bytes = done.moved_bytes
        return dict(done.seconds)

    def floor(self) -> dict[str, float]:
        return {}


def measure_side(
    context: RankContext,
    *,
    side: str,
    source: dict[str, int],
    target: dict[str, int],
    num_layers: int,
    width: str,
    num_runs: int,
    device: str,
    folder: str,
) -> Results:
    """`began`, `ended` and the seconds of each part, one element a run. `moved_bytes` are those of all ranks; -1 where
    the side does not count them."""
    crew = Crew.of(context, Path(folder), torch.device(device))
    state = LogicalState(model(num_layers, width=Width(width)), crew.device)
    meshes = [
        state.provider.mesh(layout, tuple(range(layout.num_ranks))) for layout in (Layout(**source), Layout(**target))
    ]
    own = OnOneDevice(crew, state) if side == "tidegate" else TorchCheckpoint(crew, state)
    found = {key: np.array(values) for key, values in times_of(crew, own, meshes, num_runs).items()}
    found["moved_bytes"] = np.array(own.moved_bytes if isinstance(own, OnOneDevice) else -1)
    crew.part()
    return found
