"""What a job that goes by way of a checkpoint does between save and load: end torch's world, and begin as it starts.

That is torch's world of the new layout's ranks, Megatron's groups in it, and model, DDP and optimizer without their
initial values. The start of new processes is not in it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
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

CPU = torch.device("cpu")


class MegatronJob:
    """One rank's; `start`, `build` and `stop` are called by all ranks of the crew alike."""

    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state

    def start(self, layout: Layout) -> None:
        """Torch's world of this layout's ranks alone, and Megatron's groups in it."""
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
        """None where this rank is not in the mesh."""
        if self._crew.rank not in mesh.ranks:
            return None
        groups = ProcessGroupCollection.use_mpu_process_groups()
        modules = self._state.provider.build(mesh, self._crew.rank, groups, device=CPU)
        chunks = [data_parallel(module, groups) for module in modules]
        return Trained(chunks, distributed_optimizer(chunks, adam(), groups), groups)

    def stop(self) -> None:
        """Safe where nothing was started."""
        parallel.stop()
