"""Moves the tensors that Megatron has built for a rank into an arena: its buffers' parameters and its optimizer's
state.

- A chunk's parameters move after DDP's construction and before the optimizer's, because the optimizer keeps views of
  them. At that point only DDP's own views exist.
- The optimizer's state moves right after its construction.
- Values are not copied: they have no meaning yet.
- The range of a parameter that a rank owns is read from the optimizer's own maps, per (dtype, is_expert) buffer and
  bucket.

Invariants:
- Afterwards every tensor of the state lies in the arena, and Megatron holds no other copy of it.
  [test_skeleton: training_on_released_and_refilled_memory]
- A range begins at a multiple of the arena's alignment. [test_skeleton: holds_exactly_what_the_planner_says]
- Ranges without elements are left out. [test_skeleton: holds_exactly_what_the_planner_says]
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
    """The part of one parameter that this rank's optimizer keeps."""

    range: FlatRange
    tensors: Mapping[StateKind, torch.Tensor]
    """Flat tensors of the range's size; the step has one element."""


def place_buffers(chunk: DistributedDataParallel, arena: Arena) -> None:
    """Move the trainable parameters of a chunk, with the padding between them, which Megatron gathers too."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.param_data = arena.empty(buffer.numel, buffer.param_dtype)
        for bucket in buffer.buckets:
            bucket.param_data = buffer.param_data[bucket.offset : bucket.offset + bucket.param_data.numel()]
        for parameter, (start, end, _) in buffer.param_index_map.items():
            parameter.data = buffer.param_data[start:end].view(parameter.shape)


def place_frozen(parameters: Iterable[torch.nn.Parameter], arena: Arena) -> None:
    """Move the parameters that DDP leaves in place."""
    for parameter in parameters:
        if not parameter.requires_grad:
            parameter.data = arena.empty(parameter.numel(), parameter.dtype).view(parameter.shape)


def place_optimizer_state(
    optimizer: Any, parameters: Mapping[str, torch.nn.Parameter], arena: Arena
) -> dict[str, OwnedShare]:
    """Move the optimizer's state. Returns the shares by logical name, in the order of `parameters`."""
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
        StateKind.EXP_AVG: packed(arena, sizes),
        StateKind.EXP_AVG_SQ: packed(arena, sizes),
    }
    if any(tensor.dtype != torch.float32 for tensor in owned.values()):
        by_kind[StateKind.MAIN_PARAM] = packed(arena, sizes)
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
    """The tensor that Adam updates: in fp32 a range of the parameter itself, else an fp32 copy of the range."""
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


def packed(arena: Arena, sizes: list[int]) -> list[torch.Tensor]:
    """One fp32 allocation for all, so that the memory is freed and taken in one piece."""
    step = ALIGNMENT_BYTES // torch.float32.itemsize
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // step) * step
    whole = arena.empty(end, torch.float32)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
