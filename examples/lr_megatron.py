"""Megatron's own scheduler driven by a ledger: 3 updates a batch instead of the 4 that its budget was made of."""

from __future__ import annotations

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tidegate.lr_progress import LrLedger, LrRules
from tidegate.lr_schedule import Decay, LrSchedule
from tidegate.megatron.lr import drive, param_scheduler

schedule = LrSchedule(3e-4, budget=40, warm_up=4, decay=Decay.LINEAR, minimum=3e-5)
ledger = LrLedger(schedule, LrRules(logical_minibatch=32))
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8))])
scheduler: OptimizerParamScheduler = param_scheduler(optimizer, schedule, weight_decay=0.01)
for batch in range(10):
    ledger = ledger.opened(batch, num_units=128)  # 4 steps
    for update, units in enumerate((range(50), range(50, 100), range(100, 128))):
        drive(scheduler, ledger)  # in place of scheduler.step(1)
        optimizer.step()
        ledger = ledger.committed_update(batch, str(update), units)
    ledger = ledger.closed(batch)
    drive(scheduler, ledger)
    print(f"{ledger.num_updates} updates, {scheduler.num_steps} steps, next rate {optimizer.param_groups[0]['lr']:.3e}")
