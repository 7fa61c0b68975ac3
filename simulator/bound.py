"""A lower bound of an iteration's time: no schedule of any policy ends earlier.

The bound assumes that lengths are known, moves are free and GPUs can be divided:

    bound = max(longest_path, order, gpu_seconds)

    longest_path  for one group: its longest member at the fastest step, then its log-probabilities and its training on
                  all GPUs, then the fixed part of the optimizer
    order         a group cannot be trained before its earliest instant; all later groups are trained after that instant
    gpu_seconds   the GPU-seconds of generation in the fullest batches, of inference and of training at one constant
                  size. The training rate is concave in the number of GPUs, so by Jensen's inequality a changing size
                  takes more GPU-seconds for the same tokens in the same time

Each term includes the weight sync.

Invariant: each term is below the time of every schedule, since it leaves out the costs that it cannot charge: prefill,
switches and the optimizer's GPUs in its fixed part. [test_bound: no_schedule_ends_before_the_bound]
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cost_model import CostLaws
from simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """The terms in seconds from the iteration's beginning. Each includes the sync."""

    longest_path_s: float
    order_s: float
    gpu_seconds_s: float

    @property
    def bound_s(self) -> float:
        return max(self.longest_path_s, self.order_s, self.gpu_seconds_s)


@dataclass(frozen=True, slots=True)
class _Group:
    ready_s: float
    """The earliest instant at which all its members can have ended."""
    num_tokens: int
    work: float
    """`num_tokens`, each as long as one of usual length."""
    train_s: float
    """The training time on all GPUs."""


def clairvoyant_bound(workload: Workload, costs: CostLaws, num_gpus: int) -> Bound:
    """ValueError: no engine fits on the GPUs."""
    if num_gpus < costs.engine.gpus_per_engine:
        raise ValueError(f"{num_gpus} GPUs hold no engine of {costs.engine.gpus_per_engine}: give the rollout more")
    groups = sorted(_groups(workload, costs, num_gpus), key=lambda group: group.ready_s)
    fixed_s, sync_s = costs.trainer.least_update_s, costs.sync.sync_s
    infer_s = [group.num_tokens / (costs.inference.rate_tokens_per_s * num_gpus) for group in groups]
    trainable_s = [group.ready_s + seconds for group, seconds in zip(groups, infer_s, strict=True)]
    longest = max(at_s + group.train_s for at_s, group in zip(trainable_s, groups, strict=True))
    return Bound(
        longest_path_s=longest + fixed_s + sync_s,
        order_s=_order_s(trainable_s, [group.train_s for group in groups]) + fixed_s + sync_s,
        gpu_seconds_s=_gpu_seconds_s(
            workload, costs, num_gpus, work=sum(group.work for group in groups), first_s=min(trainable_s)
        )
        + sync_s,
    )


def _groups(workload: Workload, costs: CostLaws, num_gpus: int) -> list[_Group]:
    rate = costs.trainer.most_rate(num_gpus)
    groups = []
    for group, row in enumerate(workload.lengths.turns):
        lengths = () if group in workload.filtered else workload.sequence_tokens(group)
        tokens = sum(lengths)
        work = tokens * costs.trainer.length_factor(lengths) if tokens else 0.0
        ready_s = max(_alone_s(workload, costs, turns) for turns in row)
        groups.append(_Group(ready_s, tokens, work, work / rate))
    return groups


def _alone_s(workload: Workload, costs: CostLaws, turns: tuple[int, ...]) -> float:
    """The time of a response alone on an engine, with the time of its environment."""
    decode_s = costs.engine.decode_s(running=1, kv_tokens=workload.prompt_tokens, steps=sum(turns))
    return decode_s + (len(turns) - 1) * workload.environment_s


def _order_s(trainable_s: list[float], train_s: list[float]) -> float:
    """The earliest end of training all groups one after the other, each not before its instant in `trainable_s`."""
    order = sorted(range(len(trainable_s)), key=trainable_s.__getitem__)
    end_s = 0.0
    for at in order:
        end_s = max(end_s, trainable_s[at]) + train_s[at]
    return end_s


def _gpu_seconds_s(workload: Workload, costs: CostLaws, num_gpus: int, *, work: float, first_s: float) -> float:
    """The smallest T with room for the GPU-seconds of all stages. The need falls with T, so bisection finds it."""
    groups = (group for group in range(workload.num_groups) if group not in workload.filtered)
    tokens = sum(sum(workload.sequence_tokens(group)) for group in groups)
    others = _rollout_gpu_s(workload, costs) + tokens / costs.inference.rate_tokens_per_s
    before_s = first_s + workload.n_minibatches * costs.trainer.least_update_s
    rate = costs.trainer.most_rate(1.0)
    exponent = costs.trainer.exponent

    def fits(end_s: float) -> bool:
        training_s = end_s - before_s
        if training_s <= 0:
            return False
        num_training: float = (work / training_s / rate) ** (1 / exponent)
        return num_training <= num_gpus and others + num_training * training_s <= num_gpus * end_s

    low, high = before_s, before_s + 1.0
    while not fits(high):
        high *= 2
    # Return the lower end: rounding must not lift the bound above a schedule.
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _rollout_gpu_s(workload: Workload, costs: CostLaws) -> float:
    """GPU-seconds of generation: each token takes its share of a step of a full engine.

    The engine's cache holds at least the token's own sequence.
    """
    engine = costs.engine
    lengths = [sum(turns) for row in workload.lengths.turns for turns in row]
    generated = sum(lengths)
    floor_s = engine.step_floor_s / engine.max_running * generated
    cached = sum(workload.prompt_tokens * length + length * (length - 1) // 2 for length in lengths)
    base_s = engine.step_base_s + engine.experts_s(engine.max_running)
    line_s = (base_s / engine.max_running + engine.step_per_sequence_s) * generated
    return engine.gpus_per_engine * max(floor_s, line_s + engine.step_per_kv_token_s * cached)
