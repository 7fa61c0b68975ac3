"""torch's own checkpoint, torch.distributed.checkpoint, to memory and back: weights and Adam's state as DTensors.

The tensors are cut as Megatron cuts them, weights over tp and moments over dp too, by the first dim; gate and up are
two tensors, for a DTensor has no blocks. Timed are save, the end of torch's world and the new one with its device mesh,
the target's memory, load. A model and an optimizer are not built, and gradients are not there: less than a job does.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.reshard_sides import Crew, Parts
from benchmarks.reshard_state import NUM_STEPS, LogicalState
from tidegate.elastic.layout import Edge, Mesh
from tidegate.elastic.optimizers import StateKind
from tidegate.elastic.parameters import Parameter, Split, Whole

_KINDS = (StateKind.WEIGHT, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


class TorchCheckpoint:
    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state
        self._held: dict[str, torch.Tensor] = {}
        self._folder = crew.folder / "dcp"

    def prepare(self, source: Mesh, target: Mesh) -> None:
        self.close()
        self._source, self._target = source, target
        self._allocate(source, self._start(source))
        for key, local in self._locals():
            local.copy_(self._want(key))
        if self._crew.rank == 0:
            self._folder.mkdir()

    def switch(self) -> dict[str, float]:
        watch = Parts()
        with watch.part("save"):
            if self._held:
                save(self._held, checkpoint_id=self._folder)
            self._held = {}
            gc.collect()
            self._crew.meet()
        with watch.part("groups"):
            self._stop()
            mesh = self._start(self._target)
        with watch.part("build"):
            self._allocate(self._target, mesh)
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
        self._held = {}
        gc.collect()
        self._stop()
        self._crew.meet()
        if self._crew.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, mesh: Mesh) -> DeviceMesh | None:
        store = self._crew.new_world()
        if self._crew.rank not in mesh.ranks:
            return None
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self._crew.rank,
            world_size=len(mesh.ranks),
            timeout=timedelta(seconds=self._crew.timeout_s),
        )
        layout = mesh.layout
        ranks = torch.tensor(mesh.ranks).view(layout.pp, layout.dp, layout.tp).transpose(1, 2)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "tp", "dp"))

    def _stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _allocate(self, mesh: Mesh, devices: DeviceMesh | None) -> None:
        """This rank's tensors, of no meaning yet."""
        if devices is None:
            return
        stage = devices["tp", "dp"]
        for parameter in self._state.parameters():
            if _stage_of(parameter, mesh) != mesh.coordinates(self._crew.rank).stage:
                continue
            for key, shape, placements in _tensors_of(parameter):
                local, _ = compute_local_shape_and_global_offset(shape, stage, placements)
                self._held[key] = DTensor.from_local(
                    torch.empty(local),
                    stage,
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
        """This rank's part of a tensor's values."""
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


def _stage_of(parameter: Parameter, mesh: Mesh) -> int:
    if isinstance(parameter.place, int):
        return list(mesh.homes())[parameter.place].stage
    return 0 if parameter.place is Edge.INPUT else mesh.layout.pp - 1


def _tensors_of(parameter: Parameter) -> Iterator[tuple[str, tuple[int, ...], tuple[Placement, Placement]]]:
    """(key, shape, placements over tp and dp)."""
    cut = parameter.cut
    over_tp = Replicate() if isinstance(cut, Whole) else Shard(cut.dim if isinstance(cut, Split) else 0)
    num_blocks = cut.stride if isinstance(cut, Split) else 1
    shape = (parameter.shape[0] // num_blocks, *parameter.shape[1:])
    for kind in _KINDS:
        for block in range(num_blocks):
            suffix = f"#{block}" if num_blocks > 1 else ""
            over_dp = Replicate() if kind is StateKind.WEIGHT else Shard(0)
            yield f"{kind}/{parameter.name}{suffix}", shape, (over_tp, over_dp)
