"""Learning-rate progress handed to Megatron: to its own scheduler, or as the rate of every parameter group.

Megatron's scheduler counts by increments, and its load adds what was saved to what it has. Here it counts nothing:
`num_steps` is assigned from the ledger before each update, an int wherever progress is whole and a Fraction elsewhere,
which its formulas take as they are. Invariants: what was assigned before has no effect, so that a resume, a repeat or
another batching cannot make the rate drift; the saved state is the ledger's, not the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tidegate.lr_progress import LrLedger
from tidegate.lr_schedule import Decay, LrSchedule


def param_scheduler(optimizer: Any, schedule: LrSchedule, *, weight_decay: float = 0.0) -> OptimizerParamScheduler:
    """Megatron's scheduler of this schedule, with constant weight decay; to be driven by `drive` only."""
    # A constant rate may warm up for longer than its budget; Megatron asks for a decay after the warm-up even so.
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
    """Set every group's rate for the next update: that of the progress before it."""
    scheduler.num_steps = ledger.num_steps
    scheduler.step(0)


def assign_learning_rate(param_groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set each group's `lr` to `rate` times its `lr_mult`."""
    for group in param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
