"""How long each stage still takes under a split of the GPUs that lasts until its end: DynaRL's predictor. Pure.

Order: lengths that unfinished sequences will have, then for each split the end of rollout, inference and trainer; the
slowest is the split's score.

Assumptions, as the predictor is not published:
- an unfinished sequence gets the mean of those that were longer than it is now, by the product-limit estimate over
  finished and unfinished lengths; one that is longer than all that finished gets `BEYOND` times its length; with a hint
  it gets at least the hint;
- the rollout ends with its longest sequence, at the speed of a decode step over all that run now;
- the trainer's rate between measured sizes is a power of its GPUs, beyond them one with `TRAINER_EXPONENT`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.policy.situation import Group, GroupStage, Situation, TrainerRate

BEYOND = 1.1
"""Without it the longest sequence would end at once, and the rollout would look done in its tail."""

TRAINER_EXPONENT = 0.4
"""Of the trainer's rate over its GPUs: what a calibration to RLinf's published timeline of 64 GPUs gives. With 1 the
published dynamic timeline cannot be had: growing the trainer would pay much more."""


@dataclass(frozen=True, slots=True)
class Split:
    """How many GPUs each component has; the rollout in engines."""

    num_engines: int
    num_trainer_gpus: int
    num_inference_gpus: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is still to be done: tokens to be inferred and trained, and what the longest sequence still makes."""

    longest_left_tokens: float
    to_infer_tokens: float
    to_train_tokens: float


def outlook(situation: Situation, *, uses_hints: bool) -> Outlook:
    expected = expected_length(situation.groups)
    longest, to_infer, to_train = 0.0, 0.0, 0.0
    for group in situation.groups:
        if group.stage is GroupStage.TAKEN:
            continue
        hint = group.hint_tokens if uses_hints and group.hint_tokens else 0.0
        ends = [max(hint, expected(each.num_tokens)) for each in group.unfinished]
        lefts = (end - each.num_tokens for end, each in zip(ends, group.unfinished, strict=True))
        longest = max(longest, *lefts) if ends else longest
        num_tokens = sum(group.finished) + sum(ends)
        to_train += num_tokens
        to_infer += 0 if group.stage is GroupStage.INFERRED else num_tokens
    return Outlook(longest, to_infer, to_train)


def expected_length(groups: tuple[Group, ...]) -> Callable[[int], float]:
    """The length that a sequence of so many tokens is expected to end with.

    Kaplan and Meier's estimate (1958): an unfinished sequence says only that it is longer than it is now.
    """
    finished = [(length, 0) for group in groups for length in group.finished]
    running = [(each.num_tokens, 1) for group in groups for each in group.unfinished]
    lengths: list[int] = []
    weights: list[float] = []
    survival, at_risk = 1.0, len(finished) + len(running)
    for length, is_running in sorted(finished + running):
        if not is_running:
            lengths.append(length)
            weights.append(survival / at_risk)
            survival -= survival / at_risk
        at_risk -= 1
    tail_weight, tail_sum = [0.0], [0.0]
    for length, weight in zip(reversed(lengths), reversed(weights), strict=True):
        tail_weight.append(tail_weight[-1] + weight)
        tail_sum.append(tail_sum[-1] + weight * length)

    def expected(num_tokens: int) -> float:
        beyond = len(lengths) - bisect_right(lengths, num_tokens)
        return tail_sum[beyond] / tail_weight[beyond] if beyond else num_tokens * BEYOND

    return expected


def slowest_stage_s(situation: Situation, left: Outlook, split: Split) -> float:
    """Seconds until the last of the three stages ends; infinite where one has work and no GPUs."""
    return max(
        _rollout_s(situation, left, split), _inference_s(situation, left, split), _train_s(situation, left, split)
    )


def _rollout_s(situation: Situation, left: Outlook, split: Split) -> float:
    if not situation.num_unfinished:
        return 0.0
    if not split.num_engines:
        return math.inf
    costs = situation.costs
    num_kv_tokens = sum(engine.num_kv_tokens for engine in situation.engines)
    step_s = costs.decode.seconds(
        num_running=situation.num_submitted / split.num_engines, num_kv_tokens=num_kv_tokens / split.num_engines
    )
    moved = max(0, len(situation.engines) - split.num_engines) / max(1, len(situation.engines))
    prefill_s = moved * num_kv_tokens / split.num_engines / costs.prefill_tokens_per_s
    switch_s = costs.release_s + costs.resubmit_s + prefill_s if moved else 0.0
    return left.longest_left_tokens * step_s + switch_s


def _inference_s(situation: Situation, left: Outlook, split: Split) -> float:
    if not left.to_infer_tokens:
        return 0.0
    if not split.num_inference_gpus:
        return math.inf
    rate = split.num_inference_gpus * situation.inference.rate_tokens_per_s_per_gpu
    starts = split.num_inference_gpus > len(situation.inference.gpus)
    return left.to_infer_tokens / rate + (situation.costs.inference_start_s if starts else 0.0)


def _train_s(situation: Situation, left: Outlook, split: Split) -> float:
    if not left.to_train_tokens:
        return 0.0
    if not split.num_trainer_gpus:
        return math.inf
    now = situation.trainer.num_gpus
    switch_s = situation.costs.reshard_s if now else situation.costs.load_s
    rate = trainer_rate(situation.trainer.measured, split.num_trainer_gpus)
    return left.to_train_tokens / rate + (switch_s if split.num_trainer_gpus != now else 0.0)


def trainer_rate(measured: tuple[TrainerRate, ...], num_gpus: int) -> float:
    """Tokens a second with so many GPUs. Several measured at one size: the last counts. At least one is needed."""
    known = sorted({each.layout.num_ranks: each.rate_tokens_per_s for each in measured}.items())
    below = [each for each in known if each[0] <= num_gpus]
    above = [each for each in known if each[0] > num_gpus]
    if not (below and above):
        size, rate = below[-1] if below else above[0]
        return rate * math.pow(num_gpus / size, TRAINER_EXPONENT)
    (small, slow), (large, fast) = below[-1], above[0]
    exponent = math.log(fast / slow) / math.log(large / small)
    return slow * math.pow(num_gpus / small, exponent)
