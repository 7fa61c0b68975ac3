"""The way without Tidegate: Megatron's dist_checkpointing in its fully reshardable form, to memory and back.

One switch has all steps of a running process:
1. save;
2. end torch's world and Megatron's groups, and begin those of the new layout;
3. build model, DDP and optimizer without initial values;
4. load.
The start of new processes is not included. Megatron can assemble the optimizer's state on the first replica or on all.
The first way is used here, since it took less than half the time.
"""

from __future__ import annotations

import gc
import shutil

from benchmarks.reshard_job import MegatronJob
from benchmarks.reshard_sides import Crew, Parts
from benchmarks.reshard_state import LogicalState
from tests.integration.elastic.dist_checkpoint import Trained, have_state, load, save
from tidegate.elastic.plan.layout import Mesh


class DistCheckpointing:
    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state
        self._job = MegatronJob(crew, state)
        self._trained: Trained | None = None
        self._folder = crew.folder / "dist_checkpointing"

    def prepare(self, source: Mesh, target: Mesh) -> None:
        self.close()
        self._source, self._target = source, target
        self._job.start(source.layout)
        self._trained = self._job.build(source)
        if self._trained is not None:
            have_state(self._trained.optimizer)
            self._state.fill(self._trained.chunks, self._trained.optimizer, source, self._crew.rank)
        if self._crew.rank == 0:
            self._folder.mkdir()

    def switch(self) -> dict[str, float]:
        watch = Parts()
        with watch.part("save"):
            if self._trained is not None:
                save(self._trained, self._folder, on_first_replica=True)
            self._trained = None
            gc.collect()
            self._crew.meet()
        with watch.part("groups"):
            self._job.stop()
            self._job.start(self._target.layout)
        with watch.part("build"):
            self._trained = self._job.build(self._target)
        with watch.part("load"):
            if self._trained is not None:
                load(self._trained, self._folder)
        return watch.seconds

    def floor(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        if self._trained is not None:
            self._state.check(self._trained.chunks, self._trained.optimizer, self._target, self._crew.rank)

    def close(self) -> None:
        self._trained = None
        gc.collect()
        self._job.stop()
        self._crew.meet()
        if self._crew.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
