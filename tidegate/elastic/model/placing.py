"""Moves what Megatron has built for a rank into an arena: the parameters of its buffers, and its optimizer's state.

The parameters of a chunk move between DDP's construction and the optimizer's, which keeps views of them: by then no
view exists but DDP's own. The state moves right after the optimizer's construction. Values do not move: they have no
meaning yet. Which range of a parameter a rank owns is read from the optimizer's own maps, per (dtype, is_expert) buffer
and bucket.
Invariants: afterwards every tensor of the state lies in the arena, and Megatron holds no other copy of it; a range
begins at a multiple of the arena's alignment; ranges without elements are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from tidegate.elastic.model.compat import keeps_step_tensors, links
from tidegate.elastic.model.memory import ALIGNMENT_BYTES, Arena
from tidegate.elastic.plan.optimizers import FlatRange, StateKind


@dataclass(frozen=True, slots=True)
class OwnedShare:
    """What this rank's optimizer keeps of one parameter."""

    range: FlatRange
    tensors: Mapping[StateKind, torch.Tensor]
    """Flat: of the range's size, the step of one element."""


def place_buffers(chunk: DistributedDataParallel, arena: Arena) -> None:
    """The trainable parameters of a chunk, with the padding between them that Megatron gathers too."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.param_data = arena.empty(buffer.numel, buffer.param_dtype)
        for bucket in buffer.buckets:
            bucket.param_data = buffer.param_data[bucket.offset : bucket.offset + bucket.param_data.numel()]
        for parameter, (start, end, _) in buffer.param_index_map.items():
            parameter.data = buffer.param_data[start:end].view(parameter.shape)


def place_frozen(parameters: Iterable[torch.nn.Parameter], arena: Arena) -> None:
    """The parameters that DDP leaves where they are."""
    for parameter in parameters:
        if not parameter.requires_grad:
            parameter.data = arena.empty(parameter.numel(), parameter.dtype).view(parameter.shape)


def place_optimizer_state(
    optimizer: Any, parameters: Mapping[str, torch.nn.Parameter], arena: Arena
) -> dict[str, OwnedShare]:
    """By logical name, in the order of `parameters`."""
    shares: dict[str, OwnedShare] = {}
    for link in links(optimizer):
        shares |= _place_link(link, parameters, arena)
    return {name: shares[name] for name in parameters if name in shares}


def _place_link(link: Any, parameters: Mapping[str, torch.nn.Parameter], arena: Arena) -> dict[str, OwnedShare]:
    adam: torch.optim.Optimizer = link.optimizer
    owned = {name: tensor for name, tensor in parameters.items() if tensor in link.model_param_gbuf_map}
    assert len(owned) == len(link.model_param_gbuf_map)
    mains = [_main_param(link, tensor) for tensor in owned.values()]
    sizes = [main.numel() for main in mains]
    by_kind = {
        StateKind.EXP_AVG: _packed(arena, sizes),
        StateKind.EXP_AVG_SQ: _packed(arena, sizes),
    }
    if any(tensor.dtype != torch.float32 for tensor in owned.values()):
        by_kind[StateKind.MAIN_PARAM] = _packed(arena, sizes)
    if keeps_step_tensors(adam):
        steps = arena.empty(len(mains), torch.float32)
        by_kind[StateKind.STEP] = [steps[at : at + 1] for at in range(len(mains))]
    shares: dict[str, OwnedShare] = {}
    for at, (name, tensor) in enumerate(owned.items()):
        share = link._get_model_param_range_map(tensor)["param"]
        tensors = {kind: placed[at] for kind, placed in by_kind.items()}
        _adopt(adam, mains[at], tensors)
        shares[name] = OwnedShare(FlatRange(share.start, share.end), tensors)
    return shares


def _main_param(link: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """What Adam updates: a range of the parameter itself in fp32, else a copy of the range in fp32."""
    group, order = link.model_param_group_index_map[parameter]
    main: torch.Tensor = link.optimizer.param_groups[group]["params"][order]
    return main


def _adopt(adam: torch.optim.Optimizer, main: torch.Tensor, tensors: Mapping[StateKind, torch.Tensor]) -> None:
    if StateKind.MAIN_PARAM in tensors:
        main.data = tensors[StateKind.MAIN_PARAM]
    state: dict[str, torch.Tensor] = {kind.value: tensors[kind] for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)}
    if StateKind.STEP in tensors:
        state["step"] = tensors[StateKind.STEP].view(())
    adam.state[main] = state


def _packed(arena: Arena, sizes: list[int]) -> list[torch.Tensor]:
    """One allocation in fp32, so that memory comes and goes in one piece."""
    step = ALIGNMENT_BYTES // torch.float32.itemsize
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // step) * step
    whole = arena.empty(end, torch.float32)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
