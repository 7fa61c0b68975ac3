"""Which optimizer state is to be moved, and who holds it. Other kinds of optimizer are refused by name.

- `PlainOptimizer`: each tensor is shaped like its parameter's shard, on every rank that holds the shard.
- `DistributedOptimizer`: each rank of a shard's data-parallel group owns a flat range of the shard. The ranges are
  those of the optimizer's own buffers (per dtype, bucket, reverse order, padded): they are given, never assumed.
`step` is a scalar a parameter, held where other state of the parameter is; None where the optimizer keeps it in its
parameter groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class StateKind(StrEnum):
    """The tensors that belong to a parameter."""

    WEIGHT = "weight"
    MAIN_PARAM = "main_param"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    STEP = "step"


class OptimizerRefused(ValueError):
    """An optimizer whose state the planner cannot describe."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    kind: StateKind
    itemsize: int


ADAM = (
    StateTensor(StateKind.MAIN_PARAM, 4),
    StateTensor(StateKind.EXP_AVG, 4),
    StateTensor(StateKind.EXP_AVG_SQ, 4),
)
"""For parameters in half precision. In fp32 the model's parameters are the main ones, which are then left out."""


class FlatRange(NamedTuple):
    """Elements `start` to `end` of a shard, flattened row by row."""

    start: int
    end: int


RangesByRank = Mapping[int, Mapping[str, FlatRange]]


@dataclass(frozen=True, slots=True)
class PlainOptimizer:
    states: tuple[StateTensor, ...] = ADAM
    step_itemsize: int | None = 4


@dataclass(frozen=True, slots=True)
class DistributedOptimizer:
    ranges: RangesByRank
    """By world rank and logical parameter; a rank without a part of a parameter does not name it."""
    states: tuple[StateTensor, ...] = ADAM
    step_itemsize: int | None = 4


Optimizer = PlainOptimizer | DistributedOptimizer

SUPPORTED = frozenset({"DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"})
"""Megatron's wrappers whose state is one of the two forms above."""
_REASONS = {
    "LayerWiseDistributedOptimizer": "it deals out whole parameters, and its state is of other kinds than Adam's",
    "HybridDeviceOptimizer": "a part of its state is offloaded to the host and moves between updates",
}


def require_supported(class_names: Iterable[str]) -> None:
    """Raises OptimizerRefused for the first class that is not of the supported ones.

    The names are those of a job's optimizers with the members of a chain in the chain's place, and of the torch
    optimizers that they wrap where those are Megatron's own.
    """
    for name in class_names:
        if name not in SUPPORTED:
            reason = _REASONS.get(name, "its state is not known to be flat ranges or shaped like the parameters")
            raise OptimizerRefused(
                f"optimizer {name} cannot change its layout: {reason}; supported: {', '.join(sorted(SUPPORTED))}"
            )
