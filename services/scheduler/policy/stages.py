"""How long each stage still takes under a split of the GPUs that lasts until its end: DynaRL's predictor. Pure.

Order: lengths that unfinished sequences will have, then for each split the end of rollout, inference and trainer; the
slowest is the split's score.

Assumptions, as the predictor is not published:
- an unfinished sequence gets the mean of those that were longer than it is now, by the product-limit estimate over
  finished and unfinished lengths; one that is longer than all that finished gets `BEYOND` times its length; with hints
  it gets what its prompt's posterior says (`lengths_law`);
- the rollout ends with its longest sequence, at the speed of a decode step over all that run now;
- the trainer's rate is the curve that all policies have (`trainer_rates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.situation import Situation
from services.scheduler.policy.trainer_rates import TrainerCurve, trainer_curve
from services.scheduler.state.layouts import replica_size
from services.scheduler.state.observed import Floats, Generation
from tidegate.types import Role

BEYOND = 1.1
"""Without it the longest sequence would end at once, and the rollout would look done in its tail."""


@dataclass(frozen=True, slots=True)
class Split:
    """How many GPUs each component has; the rollout in engines."""

    num_engines: int
    num_trainer_gpus: int
    num_inference_gpus: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is still to be done: tokens to be inferred and trained, minibatches not begun, what the longest sequence
    still makes; `switch_s`, seconds from one number of the trainer's copies to another, [before, after]; and the
    trainer's rates."""

    longest_left_tokens: float
    to_infer_tokens: float
    to_train_tokens: float
    num_updates: int
    switch_s: Floats
    trainer: TrainerCurve


def outlook(situation: Situation, *, uses_hints: bool) -> Outlook:
    told, ready = situation.generation, list(situation.inference.inferring.ready)
    training = situation.trainer.training
    lengths = told.length_of.astype(np.float64)
    if uses_hints and told.hints:
        ends = final_lengths(told, situation.lengths, is_spread=False)
    else:
        ends = np.where(told.is_unfinished, expected_length(told)(lengths), lengths)
    by_group = ends.reshape(-1, told.group_size).sum(axis=1)
    copy = replica_size(situation.spec.placement[Role.ACTOR].layout)
    return Outlook(
        longest_left_tokens=float((ends - lengths).max(initial=0.0)),
        to_infer_tokens=float(np.delete(by_group, ready).sum()),
        to_train_tokens=float(np.delete(by_group, ready[: training.num_taken]).sum()),
        num_updates=situation.spec.num_minibatches - training.num_minibatches_done - (not training.is_at_boundary),
        switch_s=situation.costs.trainer_switches_s(copy_size=copy, most=len(situation.spec.gpus) // copy),
        trainer=trainer_curve(situation),
    )


def expected_length(told: Generation) -> Callable[[Floats], Floats]:
    """The lengths that sequences of so many tokens are expected to end with.

    Kaplan and Meier's estimate (1958): an unfinished sequence says only that it is longer than it is now.
    """
    order = np.lexsort((told.is_unfinished, told.length_of))
    is_end = ~told.is_unfinished[order]
    at_risk = len(order) - np.arange(len(order))
    survival = np.cumprod(np.where(is_end, 1 - 1 / at_risk, 1.0))
    weights = (np.concatenate(([1.0], survival[:-1])) / at_risk)[is_end]
    lengths = told.length_of[order][is_end].astype(np.float64)
    tail_weight, tail_sum = _sums_from(weights), _sums_from(weights * lengths)

    def expected(num_tokens: Floats) -> Floats:
        first = np.searchsorted(lengths, num_tokens, side="right")
        means = tail_sum[first] / np.maximum(tail_weight[first], np.finfo(np.float64).tiny)
        return np.where(first < len(lengths), means, num_tokens * BEYOND)

    return expected


def _sums_from(values: Floats) -> Floats:
    """Of the values from each index to the end, and of none."""
    return np.concatenate((np.cumsum(values[::-1])[::-1], [0.0]))


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
    rate = split.num_inference_gpus * situation.inference_tokens_per_s_per_gpu
    starts = split.num_inference_gpus > len(situation.inference.gpus)
    return left.to_infer_tokens / rate + (situation.costs.inference_start_s if starts else 0.0)


def _train_s(situation: Situation, left: Outlook, split: Split) -> float:
    if not left.to_train_tokens:
        return 0.0
    if not split.num_trainer_gpus:
        return math.inf
    now = situation.trainer.num_gpus
    copy = replica_size(situation.spec.placement[Role.ACTOR].layout)
    copies = split.num_trainer_gpus // copy
    switch_s = float(left.switch_s[now // copy, copies])
    # A person may have moved it, within the iteration, to smaller copies.
    rate = float(left.trainer.tokens_per_s(np.array([max(1, copies)]), copy_size=copy)[0])
    train_s = left.to_train_tokens / rate + left.num_updates * situation.costs.update_s
    return train_s + switch_s
