"""The actor's learning-rate ledger: its start, the effect of an update, its metrics.

A batch of the ledger is a minibatch, and owns one step of the budget. At a start, the first of these cases applies:
1. No checkpoint: progress is 0.
2. The checkpoint has a learning-rate ledger: it continues, and its schedule is compared with the config's.
3. The checkpoint predates that ledger and counts trained samples: `legacy_policy` of the config decides how to adopt
   it.

Invariants:
- A checkpoint's learning-rate ledger covers the same updates as its weights.
  [test_lead_lr: run_that_was_never_interrupted]
- An iteration owns one step for each minibatch planned for it. [test_lead_lr: planned_minibatches_that_no_group_filled]
- Where a rank's progress differs from the lead's, no update is recorded and the job ends.
  [test_lead_lr: of_other_progress_ends_the_job]
- Where an optimizer's rate after an update differs from the ledger's, the job ends.
  [test_lead_lr: another_rate_than_the_ledger_ends_the_job]
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
from tidegate.lr.progress import LrLedger, agreed_mark
from tidegate.v1 import workers_pb2 as wire

_MAX_NAMED_RANKS = 4
"""The most ranks that a message names."""


def ledger_of(config: JobConfig, checkpoint: Checkpoint | None) -> LrLedger:
    """The ledger at a start. Raises LrError where the checkpoint's ledger cannot be continued."""
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
    """The update of one minibatch, before its outcome is known."""

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
        """Raise RanksDisagree unless all ranks agree with the ledger after the update.

        Every rank's progress must be the ledger's. Every optimizer must have the ledger's rate or, after a skipped
        update, the same rate as its peers."""
        mark = agreed_mark({rank: report.lr_mark for rank, report in enumerate(reports)})
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
                f"{_listed(want_rates)}, and {_rank_rates(others)}: resume from a checkpoint"
            )

    @property
    def _opened(self) -> LrLedger:
        return self.before.opened(self.before.next_batch, self.num_samples, nominal=1)


def _listed(rates: Sequence[float]) -> str:
    return " and ".join(map(repr, rates)) or "of no group"


def _rank_rates(held: Mapping[int, Sequence[float]]) -> str:
    """The rates of the first few ranks, and the number of the other ranks."""
    named = [f"rank {rank} has {_listed(rates)}" for rank, rates in list(held.items())[:_MAX_NAMED_RANKS]]
    num_others = len(held) - len(named)
    return ", ".join(named) + (f" and {num_others} more ranks have another rate" if num_others else "")


def without_update(ledger: LrLedger, *, num_minibatches: int) -> LrLedger:
    """The ledger after `num_minibatches` minibatches that were planned and had nothing to train on."""
    for _ in range(num_minibatches):
        ledger = ledger.emptied(ledger.next_batch, 1)
    return ledger


def lr_metrics(ledger: LrLedger) -> dict[str, float]:
    """The ledger's figures as floats, for people and trackers. The ledger itself stays exact."""
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
    """A warning at the one step that passes the budget, else None."""
    if before.overshoot or not after.overshoot:
        return None
    return (
        f"progress is {after.progress} of a budget of {after.schedule.budget} steps: updates from here on have rate "
        f"{after.rate:g}; raise actor.lr_schedule.budget_updates for a longer decay"
    )
