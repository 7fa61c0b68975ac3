"""GRPO around its loss: advantages within a group, the weight of each token, the metrics of an update. Pure numpy.

The loss of an update is the sum over all its response tokens of `token weight * token loss`; the weights hold the
global denominators, so that micro-batches, replicas and stages only ever add. Invariants: prompt, padding and masked
samples weigh nothing and are in no denominator; groups of zero spread or of one sample get advantage 0 and stay in the
denominators. The advantages are those of DeepSeekMath (arXiv 2402.03300).
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

STD_EPSILON = 1e-6
"""Added to a group's standard deviation: keeps nearly equal rewards from dividing by nearly nothing."""


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"


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


def token_weights(samples: Sequence[TrainSample], aggregation: Aggregation) -> list[float]:
    """The weight of each token of each sample; a minibatch without a token to train weighs nothing."""
    counts = [sample.num_trained_tokens for sample in samples]
    num_tokens, num_sequences = sum(counts), sum(count > 0 for count in counts)
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return [1.0 / num_tokens if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return [1.0 / (num_sequences * count) if count else 0.0 for count in counts]
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return [1.0 / num_sequences if count else 0.0 for count in counts]


def update_metrics(samples: Sequence[TrainSample], sums: Sequence[float]) -> dict[str, float]:
    """An update's metrics, from its samples and the global `SUMS`."""
    counted = [sample for sample in samples if not sample.masked]
    num_tokens = sum(sample.num_trained_tokens for sample in counted)
    _, kl, clipped_tokens, ratio, absolute_terms = sums
    divisor = max(num_tokens, 1)
    metrics = {
        "kl": kl / divisor,
        "clip_fraction": clipped_tokens / divisor,
        "ratio": ratio / divisor,
        "absolute_terms": absolute_terms,
        "num_tokens": float(num_tokens),
    }
    return metrics | _mismatch(counted)


def iteration_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """An iteration's metrics from those of its updates: means of the finite ones, but tokens added up, the greatest
    mismatch, the last learning rate."""
    metrics: dict[str, float] = {}
    for key in sorted({key for update in updates for key in update}):
        values = [update[key] for update in updates if math.isfinite(update.get(key, math.nan))]
        if values:
            metrics[key] = _COMBINED.get(key, statistics.fmean)(values)
    return metrics


def _last(values: Sequence[float]) -> float:
    return values[-1]


_COMBINED: dict[str, Callable[[Sequence[float]], float]] = {"num_tokens": math.fsum, "mismatch_max": max, "lr": _last}


def _mismatch(samples: Sequence[TrainSample]) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's."""
    if not samples:
        return {"mismatch_mean": 0.0, "mismatch_max": 0.0}
    trainer = np.concatenate([np.asarray(sample.old_log_probs, dtype=np.float64) for sample in samples])
    engine = np.concatenate([np.asarray(sample.engine_log_probs, dtype=np.float64) for sample in samples])
    distance = np.abs(trainer - engine)
    return {"mismatch_mean": float(distance.mean()), "mismatch_max": float(distance.max())}
