"""The lead's state of an iteration's training, the journal's row of an update, and the iteration's report.

Invariant: every figure in a journal's row or in a report is finite or null, as JSON requires.
[test_lead_nonfinite: null_in_the_journal]
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.actor.grpo import group_advantages, iteration_metrics
from services.actor.ledger import OpenIteration
from services.actor.minibatches import MinibatchAssembly
from services.actor.training_picture import TrainingPicture
from tidegate.candidates import has_spread
from tidegate.codec import fate_of, finite_only
from tidegate.config.sections.job import AlgorithmSection
from tidegate.ports.bus import SampleDelivery
from tidegate.runtime.lead import rewards_of
from tidegate.types import SampleId
from tidegate.v1 import events_pb2, samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire


@dataclass(slots=True)
class BegunMinibatch:
    """The portions of the open minibatch whose gradients the ranks hold uncommitted."""

    portions: list[wire.Accumulate] = field(default_factory=list)
    """As the ranks got them, in order."""
    num_tokens: int = 0
    """Their response tokens."""
    num_interruptions: int = 0
    """`AllRanks.num_interruptions` since the gradients are where they are: at another number they are lost."""

    @property
    def num_portions(self) -> int:
        return len(self.portions)


@dataclass(slots=True)
class IterationState:
    """The state of one iteration's training; `held` are the groups that wait for their update, by prompt."""

    plan: types_pb2.IterationPlan
    assembly: MinibatchAssembly
    picture: TrainingPicture
    held: dict[int, SampleDelivery] = field(default_factory=dict)
    trained_lengths: dict[int, list[int]] = field(default_factory=dict)
    """The tokens of each sample, prompt and response, of the held groups that are not filtered, by prompt."""
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_failed_rewards: int = 0
    num_minibatches_taken: int = 0
    num_duplicates_dropped: int = 0
    updates: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each update."""
    begun: BegunMinibatch = field(default_factory=BegunMinibatch)
    num_dropped_tokens: int = 0
    """The response tokens whose gradients were dropped, since the last update."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next portion may have become ready."""

    def hold(self, delivery: SampleDelivery, *, filters: bool) -> None:
        """Take in a complete group. `filters`: whether a group without spread is not trained."""
        group = delivery.group
        spread = has_spread(rewards_of(group))
        self.held[group.prompt] = delivery
        if spread or not filters:
            lengths = [len(group.prompt_tokens) + len(sample.response_tokens) for sample in group.samples]
            self.trained_lengths[group.prompt] = lengths
        self.assembly.add(group.prompt, has_spread=spread)

    def let_go(self, prompts: Iterable[int]) -> list[SampleDelivery]:
        """The deliveries of these groups, which are held no longer."""
        for prompt in prompts:
            self.trained_lengths.pop(prompt, None)
        return [self.held.pop(prompt) for prompt in prompts]

    def trained_groups(self, prompts: Iterable[int]) -> list[samples_pb2.SampleGroup]:
        """The held groups of these prompts, without the filtered ones."""
        return [self.held[prompt].group for prompt in prompts if prompt in self.trained_lengths]

    def drop_portions(self) -> None:
        """Count the portions of the open minibatch as lost. Its groups wait again."""
        self.num_dropped_tokens += self.begun.num_tokens
        self.begun = BegunMinibatch()
        self.assembly.give_back()
        self.picture.drop()

    def note_groups(self, groups: Sequence[samples_pb2.SampleGroup]) -> None:
        """Note the groups of a minibatch for the iteration's report."""
        for group in groups:
            self.rewards.extend(rewards_of(group))
            self.lengths.extend(len(sample.response_tokens) for sample in group.samples)
            self.num_failed_rewards += sum(len(sample.failures) for sample in group.samples)

    async def until_changed(self, intake: asyncio.Task[None]) -> None:
        """Wait until `changed` is set, and clear it. Raises the error of an intake of groups that failed."""
        waiting = asyncio.create_task(self.changed.wait())
        try:
            await asyncio.wait([waiting, *([] if intake.done() else [intake])], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if intake.done():
            intake.result()
        self.changed.clear()


def update_samples(group: samples_pb2.SampleGroup, algorithm: AlgorithmSection) -> list[wire.TrainSample]:
    """A group's responses with their advantages, as the lead sends them to every rank."""
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


def update_report(reports: Sequence[wire.UpdateReport]) -> wire.UpdateReport:
    """The report of an update, from its ranks' reports.

    All reports agree, except that a rank which joined after the update has no figures."""
    return next((report for report in reports if report.metrics), reports[0])


def journal_row(
    update_id: str, ids: Sequence[SampleId], report: wire.UpdateReport, rate: float, *, num_dropped_tokens: int
) -> dict[str, Any]:
    """The journal's row of one update, applied or not.

    `rate` is the requested learning rate. The row of an applied update has the optimizer's own rate.
    `num_dropped_tokens` are those of portions that were trained for it in vain."""
    return {
        "update": update_id,
        "committed": report.committed,
        "loss": _number(report.loss),
        "grad_norm": _number(report.grad_norm),
        "learning_rate": report.learning_rates[0] if report.committed else rate,
        "dropped_tokens": num_dropped_tokens,
        "samples": [str(sample) for sample in ids],
    }


def iteration_report(
    state: IterationState, fates: OpenIteration, lr: Mapping[str, float]
) -> events_pb2.IterationReported:
    """The actor's account of an iteration in which every sample has a fate. `lr` are the learning-rate metrics."""
    lengths, rewards, spread = sorted(state.lengths), state.rewards, state.assembly.candidates.seen
    metrics = iteration_metrics(state.updates) | {
        "reward_mean": sum(rewards) / len(rewards),
        "num_failed_rewards": float(state.num_failed_rewards),
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
        num_duplicates_dropped=state.num_duplicates_dropped,
        metrics=finite_only(metrics),
    )


def _number(figure: float) -> float | None:
    """None for NaN and infinities, which JSON cannot hold."""
    return figure if math.isfinite(figure) else None
