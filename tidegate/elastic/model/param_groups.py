"""Carries the values of parameter groups, besides their parameters, from one layout's optimizer to the next one's.

- Megatron makes the same groups on all ranks of a mesh. A rank may have no parameter in some of them.
- Groups of two layouts differ in one way: with expert parallelism, experts have groups of their own; without it, they
  share the dense ones.
- So a group is identified by its values at its making, which are a function of the optimizer's config. `mark` writes
  them into the group.
- Later values change in training: learning rate and its bounds, multipliers, weight decay, betas, FusedAdam's step
  count. A switch carries them along, and a member that has just joined receives them as JSON.

Invariants:
- After `assign` each group has the values of the source's group with the same mark. Where dense and expert groups share
  a mark, an expert group has the expert group's values. [test_skeleton: optimizer_continues_with_the_groups_values]
- A scheduler writes to the groups of one optimizer: the last one to which it was bound.
  [test_skeleton: optimizer_continues_with_the_groups_values]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from pydantic import JsonValue

from tidegate.elastic.model.compat import group_steps

GroupValues = Mapping[str, JsonValue]

_EXPERTS = "is_expert_parallel"
_MARK = "made_as"
_STEP = "step"


def mark(optimizer: Any) -> None:
    """Call this once, before anything changes the groups' values."""
    for group in optimizer.param_groups:
        group[_MARK] = json.dumps({key: value for key, value in _said_by(group).items() if key != _EXPERTS})


def values_of(optimizer: Any) -> tuple[GroupValues, ...]:
    """The values of a marked optimizer, group by group."""
    # A group that is empty on this rank may have parameters where these values go.
    steps = group_steps(optimizer)
    common = {} if steps is None else {_STEP: steps}
    return tuple(_said_by(group) | common for group in optimizer.param_groups)


def assign(optimizer: Any, values: Sequence[GroupValues]) -> None:
    """Set the groups of a marked optimizer to `values`.

    Raises ValueError where a group has no values; nothing is assigned then.
    """
    pairs = [(group, _values_for(group, values)) for group in optimizer.param_groups]
    for group, group_values in pairs:
        for key, value in group_values.items():
            if key not in (_MARK, _EXPERTS):
                group[key] = tuple(value) if isinstance(value, list) else value


def rebind(scheduler: OptimizerParamScheduler, optimizer: Any, *, num_steps: int) -> None:
    """Let a scheduler that has counted `num_steps`, in its own unit, continue with this optimizer's groups."""
    scheduler.optimizer = optimizer
    scheduler.num_steps = num_steps
    scheduler.step(0)


def _values_for(group: dict[str, Any], values: Sequence[GroupValues]) -> GroupValues:
    alike = [each for each in values if each[_MARK] == group[_MARK]]
    if not alike:
        raise ValueError(
            f"none of {len(values)} parameter groups was made as {group[_MARK]}: both optimizers must be made from one "
            "model and one config"
        )
    return next((each for each in alike if each[_EXPERTS] == group[_EXPERTS]), alike[0])


def _said_by(group: dict[str, Any]) -> dict[str, JsonValue]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
