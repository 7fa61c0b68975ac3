"""Megatron's own way from one layout to another, dist_checkpointing (fully reshardable), as the oracle for ours.

- All ranks of torch's WORLD call `save`, and all call `load`, each with its `Trained`, or with None where it has no
  part of that layout.
- `held_state` has a rank's tensors by logical name.
- `logical_state` joins the ranks' answers, in the test's process.

Nothing here uses our plans, transports or arenas. Every element of a logical tensor must be found at some rank, and
replicas and tied copies must agree bit for bit. Padding is omitted. After `load` each parameter has its own step count.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import determine_global_metadata
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.ranks import Results
from tidegate.elastic.model import compat
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.parameters import Parameter, shard_of

State = dict[tuple[str, StateKind], npt.NDArray[Any]]

_MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass(frozen=True, slots=True)
class Trained:
    """One rank's part of a layout."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: Any
    groups: ProcessGroupCollection

    def sharded_state(self, *, is_loading: bool, on_first_replica: bool = False) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": on_first_replica,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self.groups.dp_cp,
        }
        if on_first_replica:
            for link in compat.links(self.optimizer):
                # Megatron gathers over gloo beside NCCL; here the group itself is gloo's.
                link.data_parallel_group_gloo = link.data_parallel_group
        with _data_parallel_rank(self.groups.dp_cp.rank()):
            models = {
                f"model{number}": chunk.module.sharded_state_dict(metadata=dict(metadata))
                for number, chunk in enumerate(self.chunks)
            }
        optimizer = self.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        return {**models, "optimizer": optimizer}


@contextmanager
def _data_parallel_rank(rank: int) -> Iterator[None]:
    """language_module.py:506 reads it from parallel_state for tied embeddings, whatever groups it gets."""
    before = parallel_state._MPU_DATA_PARALLEL_RANK
    parallel_state._MPU_DATA_PARALLEL_RANK = rank
    try:
        yield
    finally:
        parallel_state._MPU_DATA_PARALLEL_RANK = before


class _AlongsideSharedWriting(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """The strategy of a rank without a part: ranks that share the writing check the whole again, with all of WORLD."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> Any:
        determine_global_metadata(sharded_state_dict)
        return super().save(sharded_state_dict, checkpoint_dir)


def save(source: Trained | None, folder: Path, *, on_first_replica: bool = False) -> None:
    """Collective over WORLD; the folder exists and is empty. Raises ValueError where WORLD's first rank has no part.

    `on_first_replica`: the optimizer's state is assembled only there, instead of on all ranks, which share the writing.
    """
    if source is None and dist.get_rank() == 0:
        raise ValueError("rank 0 of WORLD holds nothing, but dist_checkpointing lets it write the common part: use it")
    # Even a synchronous save would start a manager process, which outlives a killed rank.
    filesystem_async._results_queue = queue.Queue()
    state: dict[str, Any] = {}
    strategy: Any = TorchDistSaveShardedStrategy() if on_first_replica else _AlongsideSharedWriting()
    if source is not None:
        state = source.sharded_state(is_loading=False, on_first_replica=on_first_replica)
        if not on_first_replica:
            strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), source.groups.dp_cp)
    dist_checkpointing.save(state, str(folder), strategy)


def load(target: Trained | None, folder: Path) -> None:
    """Collective over WORLD. The target then has the saved weights and optimizer state."""
    if target is not None:
        have_state(target.optimizer)
    state = {} if target is None else target.sharded_state(is_loading=True)
    loaded = dist_checkpointing.load(state, str(folder))
    if target is None:
        return
    for number, chunk in enumerate(target.chunks):
        chunk.module.load_state_dict(loaded[f"model{number}"])
    links = getattr(target.optimizer, "chained_optimizers", [target.optimizer])
    states = [loaded["optimizer"]] if len(links) == 1 else [loaded["optimizer"][number] for number in range(len(links))]
    for link, saved in zip(links, states, strict=True):
        _load_link(link, saved)


def held_state(target: Trained, named: Iterable[tuple[str, torch.nn.Parameter]]) -> Results:
    """This rank's tensors as `KIND/NAME`, flat and in fp32. NaN where the optimizer's range does not reach."""
    found: Results = {}
    for name, weights in named:
        found[f"{StateKind.WEIGHT}/{name}"] = weights.detach().float().reshape(-1).numpy().copy()
        held, tensors = optimizer_tensors(target.optimizer, weights)
        for kind, tensor in tensors.items():
            local = np.full(1 if kind is StateKind.STEP else weights.numel(), np.nan, dtype=np.float32)
            local[slice(None) if kind is StateKind.STEP else held] = tensor.detach().numpy()
            found[f"{kind}/{name}"] = local
    return found


def logical_state(results: Sequence[Results], parameters: Iterable[Parameter], mesh: Mesh) -> State:
    """The unsharded tensors from the ranks' `held_state`. Raises AssertionError on a hole or a disagreement."""
    whole: State = {}
    by_name = {parameter.name: parameter for parameter in parameters}
    for index, rank in enumerate(mesh.ranks):
        tp_rank = mesh.coordinates(index).tp
        for key, local in results[rank].items():
            kind, _, name = key.partition("/")
            if kind in set(StateKind):
                _put(whole, by_name[name], StateKind(kind), local, tp=mesh.layout.tp, tp_rank=tp_rank)
    missing = by_name.keys() - {name for name, _ in whole}
    holes = [key for key, tensor in whole.items() if np.isnan(tensor).any()]
    assert not missing, f"no rank holds {sorted(missing)}"
    assert not holes, f"no rank holds all of {holes}"
    return whole


def _put(
    whole: State, parameter: Parameter, kind: StateKind, local: npt.NDArray[Any], *, tp: int, tp_rank: int
) -> None:
    key = (parameter.name, kind)
    if kind is StateKind.STEP:
        assert np.array_equal(whole.setdefault(key, local), local), f"{key}: ranks count {whole[key]} and {local} steps"
        return
    shard = shard_of(parameter.shape, parameter.cut, tp=tp, tp_rank=tp_rank)
    target = whole.setdefault(key, np.full(parameter.shape, np.nan, dtype=local.dtype)).reshape(shard.rows, -1)
    for piece in shard.pieces:
        part = local.reshape(shard.rows, shard.width)[:, piece.local : piece.local + piece.size]
        place = target[:, piece.logical : piece.logical + piece.size]
        differs = ~np.isnan(place) & ~np.isnan(part) & (place != part)
        assert not differs.any(), f"{key}: {differs.sum()} elements are not the same on all ranks that hold them"
        np.copyto(place, part, where=~np.isnan(part))


def optimizer_tensors(optimizer: Any, weights: torch.nn.Parameter) -> tuple[slice, Mapping[StateKind, torch.Tensor]]:
    """The elements of a parameter whose state this rank keeps, and that state, step included. May be empty."""
    for link in compat.links(optimizer):
        if weights in link.model_param_group_index_map:
            group, order = link.model_param_group_index_map[weights]
            main = link.optimizer.param_groups[group]["params"][order]
            held = link._get_model_param_range_map(weights)["param"]
            state = link.optimizer.state[main]
            kinds = (*_MOMENTS, StateKind.STEP)
            return slice(held.start, held.end), {StateKind.MAIN_PARAM: main, **{kind: state[kind] for kind in kinds}}
    return slice(0, 0), {}


def have_state(optimizer: Any) -> None:
    """Create the state that torch's Adam creates at its first step: `load` needs it before, with the same step
    everywhere.
    """
    for link in compat.links(optimizer):
        for group in link.optimizer.param_groups:
            for main in group["params"]:
                state = link.optimizer.state[main]
                for kind in _MOMENTS:
                    state.setdefault(str(kind), torch.zeros_like(main))
                state.setdefault("step", torch.zeros((), dtype=torch.float32)).zero_()


def _load_link(link: Any, saved: dict[str, Any]) -> None:
    """Like `load_state_dict`, without its two faults with torch's Adam.

    It gives all parameters one shared step tensor, which then counts once per parameter (distrib_optimizer.py:1028),
    and it fails on state whose step is a tensor (:1223).
    """
    del saved["param_state_sharding_type"]
    param_state = saved.pop("param_state")
    link.load_state_dict(saved)
    steps = {main: state.pop("step") for main, state in link.optimizer.state.items()}
    link.load_parameter_state_from_fully_reshardable(param_state)
    for main, step in steps.items():
        link.optimizer.state[main]["step"] = step.detach().clone()
