"""A time under which no schedule of an iteration can end, whoever decides: lengths known, moves free, GPUs fractional.

The largest of three lower bounds, and the weight sync:
1. The longest path: a group's longest member at the fastest step, its log-probabilities and its training on all GPUs,
   the optimizer's fixed part.
2. The pipeline's order: a group cannot be trained before it is there, so from its earliest instant on all groups that
   are not earlier are still to be trained.
3. GPU-seconds: generation in the fullest batches, inference, and training at one constant size: its rate is concave in
   the GPUs, so by Jensen no other way to train as many tokens in as many seconds takes fewer GPU-seconds.
Invariant: each is below every schedule: what a relaxation cannot charge (prefill, switches, the optimizer's GPUs in its
fixed part) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.costs import Costs
from simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds from the iteration's beginning; each with the sync."""

    longest_path_s: float
    order_s: float
    gpu_seconds_s: float

    @property
    def bound_s(self) -> float:
        return max(self.longest_path_s, self.order_s, self.gpu_seconds_s)


@dataclass(frozen=True, slots=True)
class _Group:
    ready_s: float
    """The earliest instant at which its members can all have ended."""
    num_tokens: int
    train_s: float
    """On all GPUs."""


def clairvoyant_bound(workload: Workload, costs: Costs, num_gpus: int) -> Bound:
    """ValueError where no engine fits."""
    if num_gpus < costs.engine.gpus_per_engine:
        raise ValueError(f"{num_gpus} GPUs hold no engine of {costs.engine.gpus_per_engine}: give it more")
    groups = sorted(_groups(workload, costs, num_gpus), key=lambda group: group.ready_s)
    fixed_s, sync_s = costs.trainer.fixed_s, costs.sync.sync_s
    infer_s = [group.num_tokens / (costs.inference.rate_tokens_per_s * num_gpus) for group in groups]
    there_s = [group.ready_s + seconds for group, seconds in zip(groups, infer_s, strict=True)]
    longest = max(there + group.train_s for there, group in zip(there_s, groups, strict=True))
    return Bound(
        longest_path_s=longest + fixed_s + sync_s,
        order_s=_order_s(there_s, [group.train_s for group in groups]) + fixed_s + sync_s,
        gpu_seconds_s=_gpu_seconds_s(workload, costs, num_gpus, first_s=min(there_s)) + sync_s,
    )


def _groups(workload: Workload, costs: Costs, num_gpus: int) -> list[_Group]:
    rate = costs.trainer.rate(num_gpus) * _best_efficiency(costs)
    groups = []
    for row in workload.lengths.turns:
        tokens = sum(_num_tokens(workload, turns) for turns in row)
        ready_s = max(_alone_s(workload, costs, turns) for turns in row)
        groups.append(_Group(ready_s, tokens, tokens / rate))
    return groups


def _num_tokens(workload: Workload, turns: tuple[int, ...]) -> int:
    return workload.prompt_tokens + sum(turns) + (len(turns) - 1) * workload.observation_tokens


def _alone_s(workload: Workload, costs: Costs, turns: tuple[int, ...]) -> float:
    """A response with an engine to itself, its environment's time included."""
    decode_s = costs.engine.decode_s(running=1, kv_tokens=workload.prompt_tokens, steps=sum(turns))
    return decode_s + (len(turns) - 1) * workload.environment_s


def _best_efficiency(costs: Costs) -> float:
    return max([1.0, *costs.trainer.layout_efficiency.values()])


def _order_s(there_s: list[float], train_s: list[float]) -> float:
    """When one machine can have trained all, none of them before it is there."""
    order = sorted(range(len(there_s)), key=there_s.__getitem__)
    end_s = 0.0
    for at in order:
        end_s = max(end_s, there_s[at]) + train_s[at]
    return end_s


def _gpu_seconds_s(workload: Workload, costs: Costs, num_gpus: int, *, first_s: float) -> float:
    """The smallest T that holds the GPU-seconds of all stages; what it asks only falls with T, so it is bisected."""
    tokens = sum(_num_tokens(workload, turns) for row in workload.lengths.turns for turns in row)
    others = _rollout_gpu_s(workload, costs) + tokens / costs.inference.rate_tokens_per_s
    before_s = first_s + workload.n_minibatches * costs.trainer.fixed_s
    rate = costs.trainer.rate(1.0) * _best_efficiency(costs)
    exponent = costs.trainer.exponent

    def fits(end_s: float) -> bool:
        training_s = end_s - before_s
        if training_s <= 0:
            return False
        num_training: float = (tokens / training_s / rate) ** (1 / exponent)
        return num_training <= num_gpus and others + num_training * training_s <= num_gpus * end_s

    low, high = before_s, before_s + 1.0
    while not fits(high):
        high *= 2
    # The lower end, so that a rounding never lifts the bound above a schedule.
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _rollout_gpu_s(workload: Workload, costs: Costs) -> float:
    """Each token's share of a step of a full engine, whose cache holds its sequence at least."""
    engine = costs.engine
    lengths = [sum(turns) for row in workload.lengths.turns for turns in row]
    generated = sum(lengths)
    floor_s = engine.step_floor_s / engine.max_running * generated
    cached = sum(workload.prompt_tokens * length + length * (length - 1) // 2 for length in lengths)
    line_s = (engine.step_base_s / engine.max_running + engine.step_per_sequence_s) * generated
    return engine.gpus_per_engine * max(floor_s, line_s + engine.step_per_kv_token_s * cached)
