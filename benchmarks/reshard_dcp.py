"""torch's own checkpoint, torch.distributed.checkpoint, to memory and back: weights and Adam's state as DTensors.

Weights are those of the model, cut as in Megatron. Gate and up are two tensors, since a DTensor has no blocks. Adam's
moments are cut over dp too, by the first dim, in memory of their own. Megatron's optimizer keeps flat ranges, which no
DTensor describes, and the conversion between both is left out. The timed parts are the save, the end of torch's world,
the new world with its groups, model, DDP and optimizer, the memory of the moments, and the load.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.reshard_job import MegatronJob
from benchmarks.reshard_sides import Crew, Parts
from benchmarks.reshard_state import NUM_STEPS, LogicalState
from tests.integration.elastic.dist_checkpoint import Trained
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.parameters import Parameter, Split, Whole

_KINDS = (StateKind.WEIGHT, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


class TorchCheckpoint:
    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state
        self._job = MegatronJob(crew, state)
        self._trained: Trained | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._folder = crew.folder / "dcp"

    def prepare(self, source: Mesh, target: Mesh) -> None:
        self.close()
        self._source, self._target = source, target
        self._job.start(source.layout)
        self._build(source)
        for key, local in self._locals():
            local.copy_(self._want(key))
        if self._crew.rank == 0:
            self._folder.mkdir()

    def switch(self) -> dict[str, float]:
        watch = Parts()
        with watch.part("save"):
            if self._held:
                save(self._held, checkpoint_id=self._folder)
            self._forget()
            self._crew.meet()
        with watch.part("groups"):
            self._job.stop()
            self._job.start(self._target.layout)
        with watch.part("build"):
            self._build(self._target)
        with watch.part("load"):
            if self._held:
                load(self._held, checkpoint_id=self._folder)
        return watch.seconds

    def floor(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        for key, local in self._locals():
            assert torch.equal(local, self._want(key)), f"{key} in {self._target.layout} is not as it was"

    def close(self) -> None:
        self._forget()
        self._job.stop()
        self._crew.meet()
        if self._crew.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _forget(self) -> None:
        self._held, self._trained = {}, None
        gc.collect()

    def _build(self, mesh: Mesh) -> None:
        """This rank's tensors, without values yet."""
        self._trained = self._job.build(mesh)
        if self._trained is None:
            return
        groups: Any = ProcessGroupCollection.use_mpu_process_groups()
        layout, place = mesh.layout, mesh.coordinates(mesh.ranks.index(self._crew.rank))
        of_stage = torch.tensor(mesh.ranks).view(layout.pp, layout.dp, layout.tp)[place.stage].T
        devices = DeviceMesh.from_group(
            [groups.tp, groups.dp], self._crew.device.type, of_stage, mesh_dim_names=("tp", "dp")
        )
        weights = dict(self._state.provider.local_parameters(self._trained.chunks, mesh, self._crew.rank))
        for parameter in self._state.parameters():
            if parameter.name not in weights:
                continue
            for key, kind, shape, placements, block in _tensors_of(parameter):
                local, _ = compute_local_shape_and_global_offset(shape, devices, placements)
                own = weights[parameter.name].detach()
                own = own if block is None else own.chunk(2)[block]
                self._held[key] = DTensor.from_local(
                    own if kind is StateKind.WEIGHT else torch.empty(local, device=self._crew.device),
                    devices,
                    placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=torch.empty(shape, device="meta").stride(),
                )
            self._held[f"{StateKind.STEP}/{parameter.name}"] = torch.zeros(())

    def _locals(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in self._held.items():
            yield key, tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _want(self, key: str) -> torch.Tensor:
        """The values of this rank's part of a tensor."""
        kind, _, rest = key.partition("/")
        name, _, block = rest.partition("#")
        held: Any = self._held[key]
        if kind == StateKind.STEP:
            return torch.tensor(NUM_STEPS)
        whole = self._state.tensor(name, StateKind(kind))
        if block:
            whole = whole.chunk(2)[int(block)]
        shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
        return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def _tensors_of(
    parameter: Parameter,
) -> Iterator[tuple[str, StateKind, tuple[int, ...], tuple[Placement, Placement], int | None]]:
    """(key, kind, shape, placements over tp and dp, index of the block) of each tensor."""
    cut = parameter.cut
    over_tp = Replicate() if isinstance(cut, Whole) else Shard(cut.dim if isinstance(cut, Split) else 0)
    num_blocks = cut.stride if isinstance(cut, Split) else 1
    shape = (parameter.shape[0] // num_blocks, *parameter.shape[1:])
    for kind in _KINDS:
        for block in range(num_blocks):
            suffix = f"#{block}" if num_blocks > 1 else ""
            over_dp = Replicate() if kind is StateKind.WEIGHT else Shard(0)
            which = block if num_blocks > 1 else None
            yield f"{kind}/{parameter.name}{suffix}", kind, shape, (over_tp, over_dp), which
