"""What a job has measured of itself, kept over its iterations: the trainer's rate in each layout it had and what of a
minibatch no GPU makes shorter, inference's rate, how fast it decodes, how long its responses are. Pure.

Invariants:
- what is newer weighs more, and nothing is kept of single sequences: it stays small however long the job runs;
- only what is whole is learned from: lengths of an iteration whose sequences have all ended, rates that are above 0;
- spreads stay at least `MIN_SIGMA`, so that whoever divides by them may.

A response that was cut at the longest allowed counts with that length: of a job that cuts many, the law is too short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.state.costs import Costs, DecodeStep, LengthLaw
from services.scheduler.state.observed import Engine, Floats, Generation, Inferring, TrainerRate, Training

DECODE_WEIGHT = 0.1
"""Of a picture against those before: some ten of them, so that one in which engines filled or moved is outvoted."""
LENGTHS_WEIGHT = 0.5
"""Of an iteration against those before: lengths drift with what is learned, over a few iterations."""
MAX_FACTOR = 1000.0
"""Between what is assumed of decoding and what is seen: beyond it a rate is a mistake."""
MIN_SIGMA = 0.01
MIN_HINTED = 8
"""Groups with a hint, from which its error is estimated."""


@dataclass(frozen=True, slots=True)
class Learned:
    """`log_decode`: the logarithm of how many times longer decode steps take than assumed, None before any was seen;
    `lengths` None before an iteration was seen whole; `update_s` and inference's rate of a GPU None before a minibatch,
    or a group, was measured."""

    rates: tuple[TrainerRate, ...] = ()
    log_decode: float | None = None
    lengths: LengthLaw | None = None
    update_s: float | None = None
    inference_tokens_per_s: float | None = None

    def costs(self, assumed: Costs) -> Costs:
        """What was measured in place of what was assumed."""
        update_s = assumed.update_s if self.update_s is None else self.update_s
        return replace(assumed, decode=self.decode(assumed.decode), update_s=update_s)

    def decode(self, assumed: DecodeStep) -> DecodeStep:
        return assumed if self.log_decode is None else assumed.slowed(math.exp(self.log_decode))


def with_training(learned: Learned, told: Training) -> Learned:
    """The last word of each layout counts, and the layout that was told of last is the last. A new lead, which does not
    know yet what no GPU makes shorter, unsays nothing: its rates are beside what is assumed of that, and stand only
    where none is known beside what was measured."""
    rates = {each.layout: each for each in told.measured}
    before = {each.layout: each for each in learned.rates}
    if told.update_s is None and learned.update_s is not None:
        rates = {layout: before.get(layout, each) for layout, each in rates.items()}
    kept = (each for layout, each in before.items() if layout not in rates)
    update_s = learned.update_s if told.update_s is None else told.update_s
    return replace(learned, rates=(*kept, *rates.values()), update_s=update_s)


def with_inferring(learned: Learned, told: Inferring) -> Learned:
    rate = told.rate_tokens_per_s_per_gpu
    return learned if rate is None else replace(learned, inference_tokens_per_s=rate)


def with_decoding(learned: Learned, told: Generation, assumed: DecodeStep) -> Learned:
    """From the engines that generate now, all together."""
    running = [each for each in told.engines if each.num_running and each.rate_tokens_per_s > 0]
    if not running:
        return learned
    rate = sum(each.rate_tokens_per_s for each in running)
    factor = sum(_assumed_rate(each, assumed) for each in running) / rate
    seen = math.log(min(MAX_FACTOR, max(1 / MAX_FACTOR, factor)))
    known = seen if learned.log_decode is None else learned.log_decode
    return replace(learned, log_decode=known + DECODE_WEIGHT * (seen - known))


def _assumed_rate(engine: Engine, assumed: DecodeStep) -> float:
    return engine.num_running / assumed.seconds(num_running=engine.num_running, num_kv_tokens=engine.num_kv_tokens)


def with_lengths(learned: Learned, told: Generation | None, assumed: LengthLaw) -> Learned:
    """From an iteration's last picture; nothing while a sequence of it is unfinished."""
    if told is None or told.num_unfinished or not told.lengths:
        return learned
    logs_GM = np.log(np.maximum(told.length_of, 1)).reshape(-1, told.group_size)
    before = learned.lengths or assumed
    law = LengthLaw(
        log_mean=float(logs_GM.mean()),
        sigma_prompt=_sigma(_prompt_variance(logs_GM), before.sigma_prompt),
        sigma_group=_sigma(_group_variance(logs_GM), before.sigma_group),
        sigma_hint=_sigma(_hint_variance(logs_GM, told.hints), before.sigma_hint),
        max_tokens=assumed.max_tokens,
    )
    return replace(learned, lengths=law if learned.lengths is None else _mixed(learned.lengths, law))


def _group_variance(logs_GM: Floats) -> float | None:
    """Within groups, over all of them; None where a group has one member."""
    return float(logs_GM.var(axis=1, ddof=1).mean()) if logs_GM.shape[1] > 1 else None


def _prompt_variance(logs_GM: Floats) -> float | None:
    """Between prompts: of the groups' means, less what their members' spread adds to it."""
    if len(logs_GM) < 2:
        return None
    within = _group_variance(logs_GM) or 0.0
    return float(logs_GM.mean(axis=1).var(ddof=1)) - within / int(logs_GM.shape[1])


def _hint_variance(logs_GM: Floats, hints: tuple[float, ...]) -> float | None:
    """Of what a hint misses a prompt's level by; a bias, such as of a mean against a median, is none of it."""
    told = np.array(hints)
    known = np.flatnonzero(told > 0) if hints else np.empty(0, dtype=np.int64)
    if len(known) < MIN_HINTED:
        return None
    missed = np.log(told[known]) - logs_GM[known].mean(axis=1)
    return float(missed.var(ddof=1)) - (_group_variance(logs_GM) or 0.0) / int(logs_GM.shape[1])


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
