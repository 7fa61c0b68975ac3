"""Handing progress to Megatron."""

from __future__ import annotations

from fractions import Fraction

from tests.unit.lr.test_lr_schedule import Groups
from tidegate.lr_progress import LrLedger, LrRules
from tidegate.lr_schedule import Decay, LrSchedule
from tidegate.megatron.lr import assign_learning_rate, drive, param_scheduler

SCHEDULE = LrSchedule(1e-3, budget=16, warm_up=Fraction(3, 2), decay=Decay.COSINE)


def test_megatrons_scheduler_is_driven_to_the_ledgers_progress_however_often() -> None:
    groups = Groups()
    scheduler = param_scheduler(groups, SCHEDULE, weight_decay=0.1)
    ledger = LrLedger(SCHEDULE, LrRules(logical_minibatch=3)).opened(0, 48)
    for unit in range(48):
        for _ in range(2):
            drive(scheduler, ledger)
        assert groups.param_groups == [{"lr": ledger.rate, "weight_decay": 0.1}]
        ledger = ledger.committed_update(0, str(unit), [unit])
    assert scheduler.num_steps == Fraction(47, 3)


def test_each_group_keeps_its_multiplier_however_often_the_rate_is_assigned() -> None:
    groups = [{"lr": 9.0, "lr_mult": 0.5}, {"lr": 9.0}]
    for _ in range(2):
        assign_learning_rate(groups, 0.1)
    assert [group["lr"] for group in groups] == [0.05, 0.1]
