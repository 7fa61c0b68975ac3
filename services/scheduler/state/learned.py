"""The job's measurements of itself, kept over its iterations. Pure.

They are the trainer's rate in each of its layouts, the part of a minibatch's duration that does not depend on the
number of GPUs, inference's rate, the speed of decoding, and the distribution of response lengths.

Invariants:
- Each new measurement lowers the weight of the earlier ones. [test_learned: old_measurements_fade]
- The size of the result does not grow with the number of iterations. [test_learned: as_small_after_many_iterations]
- Only an iteration whose sequences have all ended changes the lengths. [test_learned: not_whole_teaches_no_lengths]
- Only a rate above 0 changes the speed of decoding. [test_learned: stand_still_teach_nothing]
- Spreads are at least `MIN_SIGMA`, so that code can divide by them. [test_learned: spread_that_can_be_divided_by]

A response that was cut at the longest allowed length counts with that length. In a job that cuts many responses, the
law is therefore too short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.state.costs import Costs, DecodeStep, LengthLaw
from services.scheduler.state.observed import Engine, Floats, Generation, Inferring, TrainerRate, Training

DECODE_WEIGHT = 0.1
"""The weight of a new picture against all earlier ones. Some ten pictures outvote one in which engines filled up."""
LENGTHS_WEIGHT = 0.5
"""The weight of a new iteration against all earlier ones. Training changes the lengths over a few iterations."""
MAX_FACTOR = 1000.0
"""The largest factor between the assumed and the measured speed of decoding. A rate beyond it is a mistake."""
MIN_SIGMA = 0.01
MIN_HINTED = 8
"""The fewest groups with a hint from which the error of hints is estimated."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What is None has not been measured yet.

    - `log_decode`: the logarithm of `measured duration of a decode step / assumed duration`.
    - `lengths`: from iterations whose sequences have all ended.
    - `update_s`: the part of a minibatch's duration that does not depend on the number of GPUs.
    - `inference_tokens_per_s`: inference's rate on one GPU.
    """

    rates: tuple[TrainerRate, ...] = ()
    log_decode: float | None = None
    lengths: LengthLaw | None = None
    update_s: float | None = None
    inference_tokens_per_s: float | None = None

    def costs(self, assumed: Costs) -> Costs:
        """The assumed costs with the measured ones in their place."""
        update_s = assumed.update_s if self.update_s is None else self.update_s
        return replace(assumed, decode=self.decode(assumed.decode), update_s=update_s)

    def decode(self, assumed: DecodeStep) -> DecodeStep:
        return assumed if self.log_decode is None else assumed.slowed(math.exp(self.log_decode))


def with_training(learned: Learned, picture: Training) -> Learned:
    """The latest rate of each layout counts. The layout of the latest report is the last in `rates`.

    A rate excludes `update_s`, measured or assumed. A new lead has not measured `update_s` yet, so its rates exclude
    the assumed one. They therefore replace no rate that excludes a measured `update_s`.
    """
    rates = {each.layout: each for each in picture.measured}
    before = {each.layout: each for each in learned.rates}
    if picture.update_s is None and learned.update_s is not None:
        rates = {layout: before.get(layout, each) for layout, each in rates.items()}
    kept = (each for layout, each in before.items() if layout not in rates)
    update_s = learned.update_s if picture.update_s is None else picture.update_s
    return replace(learned, rates=(*kept, *rates.values()), update_s=update_s)


def with_inferring(learned: Learned, picture: Inferring) -> Learned:
    rate = picture.rate_tokens_per_s_per_gpu
    return learned if rate is None else replace(learned, inference_tokens_per_s=rate)


def with_decoding(learned: Learned, picture: Generation, assumed: DecodeStep) -> Learned:
    """Measures over all engines that generate now, together."""
    running = [each for each in picture.engines if each.num_running and each.rate_tokens_per_s > 0]
    if not running:
        return learned
    rate = sum(each.rate_tokens_per_s for each in running)
    factor = sum(_assumed_rate(each, assumed) for each in running) / rate
    measured = math.log(min(MAX_FACTOR, max(1 / MAX_FACTOR, factor)))
    known = measured if learned.log_decode is None else learned.log_decode
    return replace(learned, log_decode=known + DECODE_WEIGHT * (measured - known))


def _assumed_rate(engine: Engine, assumed: DecodeStep) -> float:
    return engine.num_running / assumed.seconds(num_running=engine.num_running, num_kv_tokens=engine.num_kv_tokens)


def with_lengths(learned: Learned, picture: Generation | None, assumed: LengthLaw) -> Learned:
    """Measures on an iteration's last picture. A picture with an unfinished sequence changes nothing."""
    if picture is None or picture.num_unfinished or not picture.lengths:
        return learned
    # G: groups, M: members of a group.
    logs_GM = np.log(np.maximum(picture.length_of, 1)).reshape(-1, picture.group_size)
    before = learned.lengths or assumed
    law = LengthLaw(
        log_mean=float(logs_GM.mean()),
        sigma_prompt=_sigma(_prompt_variance(logs_GM), before.sigma_prompt),
        sigma_group=_sigma(_group_variance(logs_GM), before.sigma_group),
        sigma_hint=_sigma(_hint_variance(logs_GM, picture.hints), before.sigma_hint),
        max_tokens=assumed.max_tokens,
    )
    return replace(learned, lengths=law if learned.lengths is None else _mixed(learned.lengths, law))


def _group_variance(logs_GM: Floats) -> float | None:
    """The mean of the variances within the groups. None if a group has one member."""
    return float(logs_GM.var(axis=1, ddof=1).mean()) if logs_GM.shape[1] > 1 else None


def _prompt_variance(logs_GM: Floats) -> float | None:
    """The variance between prompts: `variance of the groups' means - variance within groups / members of a group`.

    None if there is one prompt.
    """
    if len(logs_GM) < 2:
        return None
    within = _group_variance(logs_GM) or 0.0
    return float(logs_GM.mean(axis=1).var(ddof=1)) - within / int(logs_GM.shape[1])


def _hint_variance(logs_GM: Floats, hints: tuple[float, ...]) -> float | None:
    """The variance of `log(hint) - log level of the prompt`, without the part that comes from the spread within groups.

    A constant bias, such as that of a mean against a median, does not count. None with fewer than `MIN_HINTED` hints.
    """
    hint_of = np.array(hints)
    known = np.flatnonzero(hint_of > 0) if hints else np.empty(0, dtype=np.int64)
    if len(known) < MIN_HINTED:
        return None
    error = np.log(hint_of[known]) - logs_GM[known].mean(axis=1)
    return float(error.var(ddof=1)) - (_group_variance(logs_GM) or 0.0) / int(logs_GM.shape[1])


def _sigma(variance: float | None, otherwise: float) -> float:
    return otherwise if variance is None else max(MIN_SIGMA, math.sqrt(max(0.0, variance)))


def _mixed(before: LengthLaw, now: LengthLaw) -> LengthLaw:
    def spread(earlier: float, later: float) -> float:
        return math.sqrt((1 - LENGTHS_WEIGHT) * earlier**2 + LENGTHS_WEIGHT * later**2)

    return LengthLaw(
        log_mean=(1 - LENGTHS_WEIGHT) * before.log_mean + LENGTHS_WEIGHT * now.log_mean,
        sigma_prompt=spread(before.sigma_prompt, now.sigma_prompt),
        sigma_group=spread(before.sigma_group, now.sigma_group),
        sigma_hint=spread(before.sigma_hint, now.sigma_hint),
        max_tokens=now.max_tokens,
    )
