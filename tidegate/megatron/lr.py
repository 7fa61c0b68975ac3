"""Passes learning-rate progress to Megatron: to its own scheduler, or as the rate of every parameter group.

- Megatron's scheduler counts by increments, and its load adds the saved count to the present one. Here it counts
  nothing: `num_steps` is assigned from the ledger before each update. It is an int wherever progress is whole,
  otherwise a Fraction; the scheduler's formulas accept both.
- Megatron's scheduler prefers a group's own `max_lr` and `min_lr`, which Megatron's optimizer fills from its config, to
  those of the schedule. So they are assigned too.

Invariants:
- Earlier assignments have no effect, so a resume, a repeat or another batching cannot make the rate drift.
- In both ways a group's rate is the schedule's rate times the group's `lr_mult`.
- Progress is saved with the ledger, not with the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tidegate.lr.errors import ScheduleRefused
from tidegate.lr.progress import LrLedger
from tidegate.lr.schedule import Decay, LrSchedule


def param_scheduler(optimizer: Any, schedule: LrSchedule, *, weight_decay: float) -> OptimizerParamScheduler:
    """Megatron's scheduler for this schedule. Only `drive` may drive it.

    `weight_decay` is constant. A group's weight decay is this times its `wd_mult`, because Megatron overwrites the
    group's own value. Raises ScheduleRefused, with nothing changed, where groups have ranges of their own.
    """
    _assign_range(optimizer.param_groups, schedule.peak, schedule.minimum)
    # A constant rate may warm up for longer than its budget, but Megatron always requires a decay after the warm-up.
    decay_steps = schedule.budget
    if schedule.decay is Decay.CONSTANT:
        decay_steps = max(decay_steps, schedule.warm_up + 1)
    is_wsd = schedule.decay is Decay.WSD
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.initial,
        max_lr=schedule.peak,
        min_lr=schedule.minimum,
        lr_warmup_steps=schedule.warm_up,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.decay.value,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=schedule.wsd_steps if is_wsd else None,
        lr_wsd_decay_style=schedule.wsd_decay.value if is_wsd else None,
    )


def drive(scheduler: OptimizerParamScheduler, ledger: LrLedger) -> None:
    """Set every group's rate for the next update: the rate for the progress before it, times the group's `lr_mult`."""
    groups = scheduler.optimizer.param_groups
    # A checkpoint that was loaded meanwhile has overwritten the groups' ranges.
    _assign_range(groups, scheduler.max_lr, scheduler.min_lr)
    scheduler.num_steps = ledger.num_steps
    scheduler.step(0)
    for group in groups:
        # Megatron's groups have the multiplier, but its step omits it. Multiply in place: a rate may be a tensor.
        group["lr"] *= group.get("lr_mult", 1.0)


def assign_learning_rate(param_groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set each group's `lr` to `rate` times its `lr_mult`."""
    for group in param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)


def group_rates(param_groups: Iterable[dict[str, Any]]) -> tuple[float, ...]:
    """The different rates of the groups, the lowest first."""
    return tuple(sorted({float(group["lr"]) for group in param_groups}))


def _assign_range(param_groups: Iterable[dict[str, Any]], peak: float, minimum: float) -> None:
    groups = list(param_groups)
    ranges = {(group.get("max_lr"), group.get("min_lr")) for group in groups}
    if len(ranges) > 1:
        raise ScheduleRefused(
            f"the parameter groups have {len(ranges)} ranges of (max_lr, min_lr), {sorted(ranges, key=str)}, but one "
            "schedule has one: leave both out of the config overrides, and give such groups an `lr_mult`"
        )
    for group in groups:
        group["max_lr"], group["min_lr"] = peak, minimum
