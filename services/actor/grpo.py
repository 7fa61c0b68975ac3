"""GRPO around its loss: advantages within a group, the weight of each token, the metrics of an update. Pure numpy.

The loss of an update is the sum over all its response tokens of `token weight * token loss`; the weights hold the
global denominators, so that micro-batches, replicas and stages only ever add. Invariants: prompt, padding and masked
samples weigh nothing and are in no denominator; groups of zero spread or of one sample get advantage 0 and stay in the
denominators. The advantages are those of DeepSeekMath (arXiv 2402.03300); those of Dr.GRPO (arXiv 2503.20783) are not
divided by the standard deviation, and its sequences are divided by a constant.
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
"""Added to a group's standard deviation: keeps nearly equal rewards from dividing by nearly nothing."""


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """The sum of a sequence's token losses over the longest response that there may be, however long it is itself."""


class OldLogProbs(StrEnum):
    """Whose log-probabilities the ratio is taken to."""

    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """What the loss depends on."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    old_log_probs: OldLogProbs = OldLogProbs.TRAINER
    importance_cap: float | None = None
    """Cap of the weights p_trainer / p_engine on the policy term; None leaves them off."""
    max_new_tokens: int | None = None
    """The longest response; `seq-mean-token-sum-norm` divides by it."""

    def __post_init__(self) -> None:
        if self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM and self.max_new_tokens is None:
            raise ValueError(f"aggregation={self.aggregation} divides by max_new_tokens: say how long responses may be")


SUMS = ("loss", "kl", "clipped_tokens", "ratio", "absolute_terms")
"""The sums over tokens of an update, added up over micro-batches and replicas: `loss` and `absolute_terms` weighted,
`kl`, `clipped_tokens` and `ratio` one a token."""


def group_advantages(rewards: Sequence[float], *, normalize_std: bool = True) -> npt.NDArray[np.float64]:
    """The advantages of one group's responses, in fp64."""
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or np.all(values == values[0]):
        return np.zeros_like(values)
    centred: npt.NDArray[np.float64] = values - values.mean()
    return centred / (values.std() + STD_EPSILON) if normalize_std else centred


def check_samples(samples: Sequence[TrainSample], settings: GrpoSettings) -> None:
    """ValueError when the settings need what a sample has not got."""
    missing = sum(not sample.reference_log_probs for sample in samples)
    if settings.kl_coefficient and missing:
        raise ValueError(
            f"kl_coefficient={settings.kl_coefficient} needs reference log-probabilities, {missing} of {len(samples)} "
            "samples have none: let the inference compute them, or set kl_coefficient to 0"
        )


def token_weights(samples: Sequence[TrainSample], settings: GrpoSettings) -> list[float]:
    """The weight of each token of each sample; a minibatch without a token to train weighs nothing."""
    counts = [sample.num_trained_tokens for sample in samples]
    num_tokens, num_sequences = sum(counts), sum(count > 0 for count in counts)
    match settings.aggregation:
        case Aggregation.TOKEN_MEAN:
            return [1.0 / num_tokens if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return [1.0 / (num_sequences * count) if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return [1.0 / num_sequences if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            assert settings.max_new_tokens is not None
            return [1.0 / (num_sequences * settings.max_new_tokens) if count else 0.0 for count in counts]


def update_metrics(
    samples: Sequence[TrainSample], sums: Sequence[float], *, importance_cap: float | None
) -> dict[str, float]:
    """An update's metrics, from its samples and the global `SUMS`."""
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    _, kl, clipped_tokens, ratio, absolute_terms = sums
    divisor = max(num_tokens, 1)
    metrics = {
        "kl": kl / divisor,
        "clip_fraction": clipped_tokens / divisor,
        "ratio": ratio / divisor,
        "absolute_terms": absolute_terms,
        "num_tokens": float(num_tokens),
    }
    return metrics | mismatch(samples, importance_cap=importance_cap)


_OVER_TOKENS = frozenset({"kl", "clip_fraction", "ratio", "mismatch_mean", "mismatch_kl", "mismatch_truncated"})
"""Means over the tokens of an update, hence of an iteration over those of all its updates."""


def iteration_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """An iteration's metrics from those of its updates: means of the finite ones, over all tokens where an update's are
    over its own, but tokens added up, the greatest mismatch, the last learning rate."""
    metrics: dict[str, float] = {}
    for key in sorted({key for update in updates for key in update}):
        told = [update for update in updates if math.isfinite(update.get(key, math.nan))]
        values = [update[key] for update in told]
        num_tokens = [update.get("num_tokens", 0.0) for update in told]
        if key in _OVER_TOKENS and any(num_tokens):
            metrics[key] = statistics.fmean(values, num_tokens)
        elif values:
            metrics[key] = _COMBINED.get(key, statistics.fmean)(values)
    return metrics


def _last(values: Sequence[float]) -> float:
    return values[-1]


_COMBINED: dict[str, Callable[[Sequence[float]], float]] = {"num_tokens": math.fsum, "mismatch_max": max, "lr": _last}
