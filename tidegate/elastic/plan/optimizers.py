"""Which optimizer state moves, and which ranks hold it. Other kinds of optimizer are refused by name.

- `PlainOptimizer`: each tensor has the shape of its parameter's shard, on every rank that holds the shard.
- `DistributedOptimizer`: each rank of a shard's data-parallel group owns a flat range of the shard. The ranges come
  from the optimizer's own buffers (per dtype, bucket, reverse order, padded): they are an input, never assumed.

`step` is one scalar per parameter, held where other state of the parameter is; None where the optimizer keeps it in its
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
    GRADIENT = "gradient"
    """The gradient of portions whose update is not made yet.

    It has the ranges of the moments, and no optimizer keeps it.
    """


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
"""Adam's tensors for parameters in half precision. In fp32 the parameters are the main ones, which are then omitted."""


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
    """By world rank and logical parameter. A rank without a part of a parameter does not name it."""
    states: tuple[StateTensor, ...] = ADAM
    step_itemsize: int | None = 4


Optimizer = PlainOptimizer | DistributedOptimizer

SUPPORTED = frozenset({"DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"})
"""Megatron's wrappers whose state has one of the two forms above."""
_REASONS = {
    "LayerWiseDistributedOptimizer": "it distributes whole parameters, and its state is of other kinds than Adam's",
    "HybridDeviceOptimizer": "a part of its state is offloaded to the host and moves between updates",
}


def require_supported(class_names: Iterable[str]) -> None:
    """Raises OptimizerRefused for the first class that is not supported.

    `class_names` has the classes of a job's optimizers, with a chain replaced by its members, and the torch optimizers
    that they wrap where those are Megatron's own.
    """
    for name in class_names:
        if name not in SUPPORTED:
            reason = _REASONS.get(name, "its state is neither known as flat ranges nor shaped like the parameters")
            raise OptimizerRefused(
                f"optimizer {name} cannot change its layout: {reason}; supported: {', '.join(sorted(SUPPORTED))}"
            )
