"""The steps between save and load of a job that changes its layout by a checkpoint: end torch's world and begin
another.

The new world has the ranks of the new layout, Megatron's groups, and model, DDP and optimizer without initial values.
The start of new processes is not included.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from benchmarks.reshard_sides import Crew
from benchmarks.reshard_state import LogicalState, adam
from tests.integration.elastic.dist_checkpoint import Trained
from tidegate.elastic.plan.layout import Mesh
from tidegate.megatron import parallel
from tidegate.megatron.updates import data_parallel, distributed_optimizer
from tidegate.types import Layout


class MegatronJob:
    """The job on one rank. All ranks of the crew call `start`, `build` and `stop` together."""

    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state

    def start(self, layout: Layout) -> None:
        """Start torch's world of this layout's ranks, and Megatron's groups in it."""
        store = self._crew.new_world()
        if self._crew.rank >= layout.num_ranks:
            return
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self._crew.rank,
            world_size=layout.num_ranks,
            timeout=timedelta(seconds=self._crew.timeout_s),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    def build(self, mesh: Mesh) -> Trained | None:
        """Build the model. None: this rank is not in the mesh."""
        if self._crew.rank not in mesh.ranks:
            return None
        groups = ProcessGroupCollection.use_mpu_process_groups()
        modules = self._state.provider.build(mesh, self._crew.rank, groups, device=self._crew.device)
        chunks = [data_parallel(module, groups) for module in modules]
        return Trained(chunks, distributed_optimizer(chunks, adam(), groups), groups)

    def stop(self) -> None:
        """End the world. It does nothing if none was started."""
        parallel.stop()
