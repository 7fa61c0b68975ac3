"""The actor's learning-rate ledger: how it begins, what an update does to it, and what is told of it.

A batch of the ledger is a minibatch, and owns one step of the budget. Order of a start: a checkpoint with a ledger goes
on where it was, its schedule held against the config's; one that was saved before there was a ledger counts trained
samples, and is taken over by the config's policy; without a checkpoint progress is 0. Invariants: the ledger that a
checkpoint holds is of the same updates as its weights; an iteration owns as many steps as minibatches were planned for
it; ranks whose state is of other progress than the lead's train nothing, and an update after which an optimizer has
another rate than the ledger's ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from services.actor.checkpoints import Checkpoint
from tidegate.config.job_config import JobConfig
from tidegate.config.schedule import num_updates_of, rules_of, samples_per_update, schedule_of
from tidegate.lr.checkpoint import adopted, resumed
from tidegate.lr.errors import RanksDisagree
from tidegate.lr.progress import LrLedger, agreed
from tidegate.v1 import workers_pb2 as wire

_NUM_TOLD = 4
"""Ranks that a message names."""


def ledger_of(config: JobConfig, checkpoint: Checkpoint | None) -> LrLedger:
    """LrError where the checkpoint's cannot be taken up."""
    schedule, rules, section = schedule_of(config), rules_of(config), config.actor.lr_schedule
    if checkpoint is None:
        return LrLedger(schedule, rules)
    if checkpoint.lr is not None:
        return resumed(checkpoint.lr, schedule, rules, on_mismatch=section.budget_mismatch)
    next_batch = checkpoint.next_iteration * config.algorithm.n_minibatches
    counters = {
        "num_steps": Fraction(checkpoint.ledger.num_trained, samples_per_update(config)),
        "lr_decay_steps": num_updates_of(config),
    }
    return adopted(counters, schedule, rules, policy=section.legacy_policy, consumed=next_batch, next_batch=next_batch)


@dataclass(frozen=True, slots=True)
class LrUpdate:
    """The update of one minibatch, whose end nobody knows yet."""

    before: LrLedger
    update_id: str
    num_samples: int

    @property
    def rate(self) -> float:
        return self.before.rate

    @property
    def committed(self) -> LrLedger:
        batch = self.before.next_batch
        return self._opened.committed_update(batch, self.update_id, range(self.num_samples)).closed(batch)

    @property
    def skipped(self) -> LrLedger:
        """Raises TooManySkips."""
        batch = self.before.next_batch
        return self._opened.skipped_update(batch, self.update_id, range(self.num_samples)).closed(batch)

    def check(self, reports: Sequence[wire.UpdateReport]) -> None:
        """RanksDisagree unless every rank's state is of the progress that the ledger will have, and every optimizer
        has the ledger's rate, or after a skipped update the same one as its peers."""
        mark = agreed({rank: report.lr_mark for rank, report in enumerate(reports)})
        want = self.committed.mark if reports[0].committed else self.before.mark
        if mark != want:
            raise RanksDisagree(
                f"after update {self.update_id} the ranks hold {mark or 'no update'} and the ledger "
                f"{want or 'no update'}: resume from a checkpoint"
            )
        held = [tuple(report.learning_rates) for report in reports]
        want_rates = (self.rate,) if reports[0].committed else held[0]
        others = {rank: rates for rank, rates in enumerate(held) if rates != want_rates}
        if others:
            raise RanksDisagree(
                f"after update {self.update_id} the optimizers should have the learning rate "
                f"{_listed(want_rates)}, and {_ranks_told(others)}: resume from a checkpoint"
            )

    @property
    def _opened(self) -> LrLedger:
        return self.before.opened(self.before.next_batch, self.num_samples, nominal=1)


def _listed(rates: Sequence[float]) -> str:
    return " and ".join(map(repr, rates)) or "of no group"


def _ranks_told(held: Mapping[int, Sequence[float]]) -> str:
    """Of many ranks the first few."""
    told = [f"rank {rank} has {_listed(rates)}" for rank, rates in list(held.items())[:_NUM_TOLD]]
    return ", ".join(told) + (f" and {len(held) - _NUM_TOLD} more another" if len(held) > _NUM_TOLD else "")


def without_update(ledger: LrLedger, *, num_minibatches: int) -> LrLedger:
    """So many minibatches were planned of which nothing was left to train on."""
    for _ in range(num_minibatches):
        ledger = ledger.emptied(ledger.next_batch, 1)
    return ledger


def lr_metrics(ledger: LrLedger) -> dict[str, float]:
    """How far it is, for people and trackers; the ledger itself stays exact."""
    return {
        "lr_progress": float(ledger.progress),
        "lr_budget": float(ledger.schedule.budget),
        "lr_nominal": float(ledger.nominal),
        "lr_updates": float(ledger.num_updates),
        "lr_skipped": float(ledger.num_skips),
        "lr_shortfall": float(ledger.shortfall + ledger.skipped),
        "lr_overshoot": float(ledger.overshoot),
    }


def passed_budget(before: LrLedger, after: LrLedger) -> str | None:
    """What to warn of, at the one step at which the budget is passed."""
    if before.overshoot or not after.overshoot:
        return None
    return (
        f"progress is {after.progress} of a budget of {after.schedule.budget} steps: updates from here on have rate "
        f"{after.rate:g}; raise actor.lr_schedule.budget_updates for a longer decay"
    )
