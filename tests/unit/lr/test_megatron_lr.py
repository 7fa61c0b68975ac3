"""Megatron's scheduler and optimizer get the progress and the rate of the ledger."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from tests.unit.lr.schedules import RATES, SHAPES, Groups, schedule_of
from tidegate.lr.errors import ScheduleRefused
from tidegate.lr.progress import LrLedger, LrRules
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.megatron.lr import assign_learning_rate, drive, param_scheduler

SCHEDULE = LrSchedule(1e-3, budget=16, warm_up=Fraction(3, 2), decay=Decay.COSINE)


def megatrons_optimizer(*overrides: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with the groups that `get_megatron_optimizer` makes, one for each override.

    Its config has lr=5e-2 and weight_decay=0.1.
    """
    defaults = {
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": 5e-2,
        "min_lr": None,
    }
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], **defaults, **override} for override in overrides]
    return torch.optim.AdamW(groups, lr=5e-2, weight_decay=0.1)


def test_megatrons_scheduler_is_driven_to_the_ledgers_progress_however_often() -> None:
    groups = Groups()
    scheduler = param_scheduler(groups, SCHEDULE, weight_decay=0.1)
    ledger = LrLedger(SCHEDULE, LrRules(logical_minibatch=3)).opened(0, 48)
    for unit in range(48):
        for _ in range(2):
            drive(scheduler, ledger)
        assert [(group["lr"], group["weight_decay"]) for group in groups.param_groups] == [(ledger.rate, 0.1)]
        ledger = ledger.committed_update(0, str(unit), [unit])
    assert scheduler.num_steps == Fraction(47, 3)


def test_each_group_keeps_its_multiplier_however_often_the_rate_is_assigned() -> None:
    groups = [{"lr": 9.0, "lr_mult": 0.5}, {"lr": 9.0}]
    for _ in range(2):
        assign_learning_rate(groups, 0.1)
    assert [group["lr"] for group in groups] == [0.05, 0.1]


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_that_megatrons_optimizer_filled_from_its_config_get_the_schedules_rates(shape: str) -> None:
    schedule = schedule_of(shape, budget=16, warm_up=2, **RATES)
    optimizer = megatrons_optimizer({}, {"wd_mult": 0.0})
    scheduler = param_scheduler(optimizer, schedule, weight_decay=0.1)
    ledger = LrLedger(schedule, LrRules(logical_minibatch=1)).opened(0, 18)
    for unit in range(18):
        drive(scheduler, ledger)
        want = [(ledger.rate, 0.1), (ledger.rate, 0.0)]
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == want, unit
        ledger = ledger.committed_update(0, str(unit), [unit])


def test_a_group_keeps_its_multiplier_within_a_warm_up_that_begins_above_0() -> None:
    schedule = LrSchedule(1e-3, budget=16, warm_up=4, initial=1e-4)
    optimizer = megatrons_optimizer({}, {"lr_mult": 0.5})
    scheduler = param_scheduler(optimizer, schedule, weight_decay=0.1)
    ledger = LrLedger(schedule, LrRules(logical_minibatch=1)).opened(0, 2).committed_update(0, "a", [0, 1])
    for _ in range(2):
        drive(scheduler, ledger)
        assert [group["lr"] for group in optimizer.param_groups] == [ledger.rate, ledger.rate * 0.5]


def test_a_checkpoint_loaded_into_the_optimizer_does_not_bring_its_rates_back() -> None:
    optimizer = megatrons_optimizer({})
    scheduler = param_scheduler(optimizer, SCHEDULE, weight_decay=0.1)
    optimizer.load_state_dict(megatrons_optimizer({}).state_dict())
    ledger = LrLedger(SCHEDULE, LrRules(logical_minibatch=1)).opened(0, 2).committed_update(0, "a", [0, 1])
    drive(scheduler, ledger)
    assert optimizer.param_groups[0]["lr"] == ledger.rate


def test_a_rate_that_is_a_tensor_is_assigned_in_place() -> None:
    optimizer = megatrons_optimizer({"lr_mult": 0.5})
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.0, dtype=torch.float64)
    ledger = LrLedger(SCHEDULE, LrRules(logical_minibatch=1)).opened(0, 2).committed_update(0, "a", [0, 1])
    drive(param_scheduler(optimizer, SCHEDULE, weight_decay=0.1), ledger)
    assert (optimizer.param_groups[0]["lr"] is rate, float(rate)) == (True, ledger.rate * 0.5)


def test_groups_with_ranges_of_their_own_are_refused_and_left_as_they_are() -> None:
    optimizer = megatrons_optimizer({}, {"max_lr": 2e-2, "min_lr": 2e-3})
    with pytest.raises(ScheduleRefused, match=r"2 ranges of \(max_lr, min_lr\), .*\(0.02, 0.002\), \(0.05, None\)"):
        param_scheduler(optimizer, SCHEDULE, weight_decay=0.2)
    want = [(5e-2, 0.1, 5e-2, None), (5e-2, 0.1, 2e-2, 2e-3)]
    keys = ("lr", "weight_decay", "max_lr", "min_lr")
    assert [tuple(group[key] for key in keys) for group in optimizer.param_groups] == want
