"""What parameter groups say besides their parameters, from one layout's optimizer to the next's.

Megatron makes the same groups on all ranks of a mesh; a rank may have nothing in some. Between layouts they differ in
one way: experts have groups of their own where there is expert parallelism, and share the dense ones where there is
none. So a group is known by what it said when it was made, which is a function of the optimizer's config: `mark` writes
that into it. What it says later (learning rate and its bounds, multipliers, weight decay, betas, FusedAdam's count of
steps) changes while training and is taken along by a switch; a member that has just joined gets it as JSON.
Invariants: after `assign` each group says what the source's group of the same mark said, that of experts where both
have one; a scheduler writes to the groups of one optimizer, the one that it was bound to last.
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
    """Called once, before anything changes what the groups say."""
    for group in optimizer.param_groups:
        group[_MARK] = json.dumps({key: value for key, value in _said_by(group).items() if key != _EXPERTS})


def values_of(optimizer: Any) -> tuple[GroupValues, ...]:
    """Group by group, of a marked optimizer."""
    # A group that is empty on this rank may have parameters where these values go.
    steps = group_steps(optimizer)
    common = {} if steps is None else {_STEP: steps}
    return tuple(_said_by(group) | common for group in optimizer.param_groups)


def assign(optimizer: Any, values: Sequence[GroupValues]) -> None:
    """Let a marked optimizer's groups say `values`; ValueError, with nothing assigned, where there are none for one."""
    pairs = [(group, _values_for(group, values)) for group in optimizer.param_groups]
    for group, said in pairs:
        for key, value in said.items():
            if key not in (_MARK, _EXPERTS):
                group[key] = tuple(value) if isinstance(value, list) else value


def rebind(scheduler: OptimizerParamScheduler, optimizer: Any, *, num_steps: int) -> None:
    """Let a scheduler that has counted `num_steps`, in its own unit, go on with this optimizer's groups."""
    scheduler.optimizer = optimizer
    scheduler.num_steps = num_steps
    scheduler.step(0)


def _values_for(group: dict[str, Any], values: Sequence[GroupValues]) -> GroupValues:
    alike = [said for said in values if said[_MARK] == group[_MARK]]
    if not alike:
        raise ValueError(
            f"no one of {len(values)} parameter groups was made as {group[_MARK]}: both optimizers must be of one "
            "model and one config"
        )
    return next((said for said in alike if said[_EXPERTS] == group[_EXPERTS]), alike[0])


def _said_by(group: dict[str, Any]) -> dict[str, JsonValue]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
