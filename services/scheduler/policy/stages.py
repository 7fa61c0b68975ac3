"""How long each stage still takes under a split of the GPUs that lasts until its end: DynaRL's predictor. Pure.

    score = max(rollout_s, inference_s, train_s)     seconds, to be low; infinite for a stage with work and without GPUs

Order:
1. The final lengths of unfinished sequences (`remaining_work`).
2. For each split the remaining seconds of rollout, inference and trainer (`slowest_stage_s`).

DynaRL did not publish its predictor. These are assumptions:
- An unfinished sequence gets the mean length of those that were longer than it is now, by the product-limit estimate
  over finished and unfinished lengths. One that is longer than all finished ones gets `BEYOND` times its length. With
  hints a sequence gets what its prompt's posterior says (`lengths_law`).
- The rollout ends with its longest sequence, at the speed of a decode step over all that run now.
- The trainer's rates and layouts are those that all policies have (`trainer_rates`, `actor_layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.scheduler.policy.actor_layouts import ActorLayouts, actor_layouts
from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.situation import Situation, Split
from services.scheduler.state.observed import Floats, Generation

BEYOND = 1.1
"""With 1 the longest sequence would end at once, and the rollout would look done in its tail."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The remaining work, and what the trainer needs for it.

    longest_left_tokens: the tokens that the longest sequence still makes.
    num_updates: minibatches that are not begun.
    layouts: the trainer's layouts by number of GPUs, with their rates.
    switch_s: seconds from one number of their steps to another, [before, after].
    """

    longest_left_tokens: float
    to_infer_tokens: float
    to_train_tokens: float
    num_updates: int
    layouts: ActorLayouts
    switch_s: Floats


def remaining_work(situation: Situation, *, uses_hints: bool) -> RemainingWork:
    picture, ready = situation.generation, list(situation.inference.inferring.ready)
    training = situation.trainer.training
    lengths = picture.length_of.astype(np.float64)
    if uses_hints and picture.hints:
        ends = final_lengths(picture, situation.lengths, is_spread=False)
    else:
        ends = np.where(picture.is_unfinished, expected_length(picture)(lengths), lengths)
    by_group = ends.reshape(-1, picture.group_size).sum(axis=1)
    layouts = layouts_of(situation)
    return RemainingWork(
        longest_left_tokens=float((ends - lengths).max(initial=0.0)),
        to_infer_tokens=float(np.delete(by_group, ready).sum()),
        to_train_tokens=float(np.delete(by_group, ready[: training.num_taken]).sum()),
        num_updates=situation.spec.num_minibatches - training.num_minibatches_done - (not training.is_at_boundary),
        layouts=layouts,
        switch_s=layouts.switches_s(situation.costs),
    )


def layouts_of(situation: Situation) -> ActorLayouts:
    """The trainer's layouts on up to all GPUs of the job, with at most one copy for each sequence of a minibatch."""
    spec = situation.spec
    return actor_layouts(situation, len(spec.gpus), most_copies=spec.num_samples_per_minibatch)


def expected_length(picture: Generation) -> Callable[[Floats], Floats]:
    """A function from present to expected final lengths, for unfinished sequences.

    It is Kaplan and Meier's estimate (1958): from an unfinished sequence only a lower bound of its length is known.
    """
    order = np.lexsort((picture.is_unfinished, picture.length_of))
    is_end = ~picture.is_unfinished[order]
    at_risk = len(order) - np.arange(len(order))
    survival = np.cumprod(np.where(is_end, 1 - 1 / at_risk, 1.0))
    weights = (np.concatenate(([1.0], survival[:-1])) / at_risk)[is_end]
    lengths = picture.length_of[order][is_end].astype(np.float64)
    tail_weight, tail_sum = _sums_from(weights), _sums_from(weights * lengths)

    def expected(num_tokens: Floats) -> Floats:
        first = np.searchsorted(lengths, num_tokens, side="right")
        means = tail_sum[first] / np.maximum(tail_weight[first], np.finfo(np.float64).tiny)
        return np.where(first < len(lengths), means, num_tokens * BEYOND)

    return expected


def _sums_from(values: Floats) -> Floats:
    """By index: the sum of the values from there to the end; 0 past the end."""
    return np.concatenate((np.cumsum(values[::-1])[::-1], [0.0]))


def slowest_stage_s(situation: Situation, left: RemainingWork, split: Split) -> float:
    """Seconds until the last of the three stages ends; infinite where one has work and no GPUs."""
    return max(
        _rollout_s(situation, left, split), _inference_s(situation, left, split), _train_s(situation, left, split)
    )


def _rollout_s(situation: Situation, left: RemainingWork, split: Split) -> float:
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


def _inference_s(situation: Situation, left: RemainingWork, split: Split) -> float:
    if not left.to_infer_tokens:
        return 0.0
    if not split.num_inference_gpus:
        return math.inf
    rate = split.num_inference_gpus * situation.inference_tokens_per_s_per_gpu
    starts = split.num_inference_gpus > len(situation.inference.gpus)
    return left.to_infer_tokens / rate + (situation.costs.inference_start_s if starts else 0.0)


def _train_s(situation: Situation, left: RemainingWork, split: Split) -> float:
    if not left.to_train_tokens:
        return 0.0
    if not split.num_trainer_gpus:
        return math.inf
    layouts = left.layouts
    now, then = layouts.steps(situation.trainer.num_gpus), layouts.steps(split.num_trainer_gpus)
    switch_s = float(left.switch_s[now, then])
    # A person may have moved the actor, within the iteration, to smaller copies: it then has GPUs for less than one.
    rate = float(layouts.rates[max(then, layouts.steps(layouts.fewest))])
    train_s = left.to_train_tokens / rate + left.num_updates * situation.costs.update_s
    return train_s + switch_s
