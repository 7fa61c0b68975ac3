"""GRPO around its loss: advantages within a group, the weight of each token, the metrics of an update. Pure numpy.

    loss of an update = minibatch_scale * (sum over its response tokens of (token_weight * token_loss))

A token's weight depends on its own sample alone, and the scale has the denominators of the whole minibatch. So
portions, micro-batches, replicas and stages only add, and the scale comes once, at the update. The advantages are those
of DeepSeekMath (arXiv 2402.03300). Dr.GRPO (arXiv 2503.20783) does not divide advantages by the standard deviation, and
divides its sequences by a constant.

Invariants:
- Prompt, padding and masked samples have weight 0. [test_microbatch: masked_samples_and_fillers]
- Masked samples are in no denominator. [test_grpo: hold_the_denominators]
- The portions of a minibatch have the weights that they have in one piece. [test_grpo: whichever_portion_they_are_in]
- Groups of zero spread or of one sample have advantage 0. [test_grpo: groups_without_spread]
- Groups of zero spread stay in the denominators. [test_grpo: zero_advantage_stays_in_the_denominators]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from services.actor.microbatch import TrainSample
from services.actor.mismatch import mismatch

STD_EPSILON = 1e-6
"""Added to a group's standard deviation. It avoids a division by nearly 0 where rewards are nearly equal."""


class Aggregation(StrEnum):
    """The way in which token losses become one number."""

    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """The sum of a sequence's token losses, divided by the longest permitted response, not by its own length."""


class OldLogProbs(StrEnum):
    """The source of the old log-probabilities in the ratio."""

    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """The settings that the loss depends on."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    old_log_probs: OldLogProbs = OldLogProbs.TRAINER
    importance_cap: float | None = None
    """The cap of the weights p_trainer / p_engine on the policy term. None: the term has no such weights."""
    max_new_tokens: int | None = None
    """The longest response; `seq-mean-token-sum-norm` divides by it."""

    def __post_init__(self) -> None:
        if self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM and self.max_new_tokens is None:
            raise ValueError(f"aggregation={self.aggregation} divides by max_new_tokens: set max_new_tokens")


SUMS = ("loss", "kl", "clipped_tokens", "ratio", "absolute_terms")
"""The names of an update's sums over tokens, over all micro-batches and replicas.

`loss` and `absolute_terms` are sums of weighted values. `kl`, `clipped_tokens` and `ratio` count each token once."""


def group_advantages(rewards: Sequence[float], *, normalize_std: bool = True) -> npt.NDArray[np.float64]:
    """The advantages of one group's responses, in fp64, in the order of `rewards`."""
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or np.all(values == values[0]):
        return np.zeros_like(values)
    centred: npt.NDArray[np.float64] = values - values.mean()
    return centred / (values.std() + STD_EPSILON) if normalize_std else centred


def check_samples(samples: Sequence[TrainSample], settings: GrpoSettings) -> None:
    """Raise ValueError when a sample lacks what the settings need."""
    missing = sum(not sample.reference_log_probs for sample in samples)
    if settings.kl_coefficient and missing:
        raise ValueError(
            f"kl_coefficient={settings.kl_coefficient} needs reference log-probabilities, and {missing} of "
            f"{len(samples)} samples have none: let the inference compute them, or set kl_coefficient to 0"
        )


def token_weights(samples: Sequence[TrainSample], settings: GrpoSettings) -> list[float]:
    """The weight of each token, by sample, without the minibatch's denominators. 0 where a sample trains no token."""
    counts = [sample.num_trained_tokens for sample in samples]
    match settings.aggregation:
        case Aggregation.TOKEN_MEAN | Aggregation.SEQ_MEAN_TOKEN_SUM:
            return [1.0 if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return [1.0 / count if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            assert settings.max_new_tokens is not None
            return [1.0 / settings.max_new_tokens if count else 0.0 for count in counts]


def minibatch_scale(samples: Sequence[TrainSample], settings: GrpoSettings) -> float:
    """The factor with the denominators of these samples, a whole minibatch. 1 where they train no token."""
    counts = [sample.num_trained_tokens for sample in samples]
    is_over_tokens = settings.aggregation is Aggregation.TOKEN_MEAN
    divisor = sum(counts) if is_over_tokens else sum(count > 0 for count in counts)
    return 1.0 / max(divisor, 1)


def update_metrics(
    samples: Sequence[TrainSample], sums: Sequence[float], *, scale: float, importance_cap: float | None
) -> dict[str, float]:
    """An update's metrics, from its samples and its global sums in the order of `SUMS`, before the scale."""
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    _, kl, clipped_tokens, ratio, absolute_terms = sums
    divisor = max(num_tokens, 1)
    metrics = {
        "kl": kl / divisor,
        "clip_fraction": clipped_tokens / divisor,
        "ratio": ratio / divisor,
        "absolute_terms": absolute_terms * scale,
        "num_tokens": float(num_tokens),
    }
    return metrics | mismatch(samples, importance_cap=importance_cap)


_TOKEN_MEANS = frozenset({"kl", "clip_fraction", "ratio", "mismatch_mean", "mismatch_kl", "mismatch_truncated"})
"""Metrics that are means over tokens: over an update's tokens in an update, over all tokens in an iteration."""


def iteration_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """An iteration's metrics, from the finite metrics of its updates.

    - A metric that is a mean over tokens (`_TOKEN_MEANS`): the mean over all tokens of the iteration.
    - `num_tokens`, `dropped_tokens`: the sum. `mismatch_max`: the maximum. `lr`: the last.
    - Any other metric: the mean over the updates.
    """
    metrics: dict[str, float] = {}
    for key in sorted({key for update in updates for key in update}):
        reporting = [update for update in updates if math.isfinite(update.get(key, math.nan))]
        values = [update[key] for update in reporting]
        num_tokens = [update.get("num_tokens", 0.0) for update in reporting]
        if key in _TOKEN_MEANS and any(num_tokens):
            metrics[key] = statistics.fmean(values, num_tokens)
        elif values:
            metrics[key] = _COMBINED.get(key, statistics.fmean)(values)
    return metrics


def _last(values: Sequence[float]) -> float:
    return values[-1]


_COMBINED: dict[str, Callable[[Sequence[float]], float]] = {
    "num_tokens": math.fsum,
    "dropped_tokens": math.fsum,
    "mismatch_max": max,
    "lr": _last,
}
