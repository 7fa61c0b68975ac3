"""An iteration's training as the lead sees it: what waits, what was done, and how both are told.

Invariant: every figure in a journal's row and in a report is one that JSON has a word for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.actor.grpo import group_advantages, iteration_metrics
from services.actor.ledger import OpenIteration
from services.actor.minibatches import MinibatchAssembly
from services.actor.showing import Showing
from tidegate.codec import fate_of, finite_only
from tidegate.config.sections.job import AlgorithmSection
from tidegate.ports.bus import SampleDelivery
from tidegate.runtime.lead import rewards_of
from tidegate.types import SampleId
from tidegate.v1 import events_pb2, samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire


@dataclass(slots=True)
class IterationTraining:
    """One iteration's training, as it stands."""

    plan: types_pb2.IterationPlan
    assembly: MinibatchAssembly
    showing: Showing
    held: dict[int, SampleDelivery] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_minibatches_taken: int = 0
    num_duplicates_dropped: int = 0
    updates: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each."""


def train_samples(group: samples_pb2.SampleGroup, algorithm: AlgorithmSection) -> list[wire.TrainSample]:
    """A group's responses with their advantages, as every rank is given them."""
    advantages = group_advantages(rewards_of(group), normalize_std=algorithm.normalize_std)
    return [
        wire.TrainSample(
            id=sample.id,
            prompt_tokens=group.prompt_tokens,
            response_tokens=sample.response_tokens,
            advantage=advantage,
            old_log_probs=sample.old_log_probs,
            reference_log_probs=sample.reference_log_probs,
            engine_log_probs=sample.engine_log_probs,
            masked=algorithm.mask_truncated and sample.finish == samples_pb2.FINISH_REASON_LENGTH,
        )
        for sample, advantage in zip(group.samples, advantages, strict=True)
    ]


def told_update(reports: Sequence[wire.UpdateReport]) -> wire.UpdateReport:
    """Of one update, by its ranks: all say the same, but one that came after it was made knows no figures."""
    return next((report for report in reports if report.metrics), reports[0])


def journal_row(update_id: str, ids: Sequence[SampleId], report: wire.UpdateReport, rate: float) -> dict[str, Any]:
    """Of one update, whether it was applied or not. `rate` is what it was asked with; that of an update that was
    applied is the optimizer's own."""
    return {
        "update": update_id,
        "committed": report.committed,
        "loss": _number(report.loss),
        "grad_norm": _number(report.grad_norm),
        "learning_rate": report.learning_rates[0] if report.committed else rate,
        "samples": [str(sample) for sample in ids],
    }


def iteration_report(
    training: IterationTraining, fates: OpenIteration, lr: Mapping[str, float]
) -> events_pb2.IterationReported:
    """The actor's account of an iteration whose every sample has met its fate; `lr` is how far the schedule is."""
    lengths, rewards, spread = sorted(training.lengths), training.rewards, training.assembly.candidates.seen
    metrics = iteration_metrics(training.updates) | {
        "reward_mean": sum(rewards) / len(rewards),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_median": float(lengths[len(lengths) // 2]),
        "response_tokens_max": float(lengths[-1]),
        "groups_with_spread": sum(spread.values()) / len(spread),
        **lr,
    }
    return events_pb2.IterationReported(
        trained=fate_of(fates.trained),
        filtered=[fate_of(ids, reason=reason) for reason, ids in sorted(fates.filtered.items())],
        discarded=[fate_of(ids, reason=reason) for reason, ids in sorted(fates.discarded.items())],
        num_duplicates_dropped=training.num_duplicates_dropped,
        metrics=finite_only(metrics),
    )


def _number(figure: float) -> float | None:
    """JSON has no word for NaN and the infinities."""
    return figure if math.isfinite(figure) else None
