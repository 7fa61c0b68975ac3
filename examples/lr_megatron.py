"""A Megatron GPT with the rate of a ledger: batches of 4 planned steps have 3 updates and use up the budget exactly."""

from __future__ import annotations

import torch
from small_gpt import forward_backward, model_and_optimizer

from tidegate.lr_progress import LrLedger, LrRules
from tidegate.lr_schedule import Decay, LrSchedule
from tidegate.megatron.lr import drive, param_scheduler

schedule = LrSchedule(1e-2, budget=40, warm_up=4, decay=Decay.LINEAR, minimum=1e-3)
ledger = LrLedger(schedule, LrRules(logical_minibatch=32))
model, optimizer = model_and_optimizer()
scheduler = param_scheduler(optimizer, schedule, weight_decay=0.01)
for batch in range(10):
    tokens = (torch.randint(16, (128, 1)) + torch.arange(16)) % 16  # counting up
    ledger = ledger.opened(batch, num_units=128)  # 4 steps
    for units in (range(50), range(50, 100), range(100, 128)):
        loss = forward_backward(model, tokens[units.start : units.stop])
        drive(scheduler, ledger)  # instead of scheduler.step(...)
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        print(f"{float(ledger.progress)} of {schedule.budget} steps: rate {rate}, loss {loss:.4f}")
        ledger = ledger.committed_update(batch, str(units.start), units)
    ledger = ledger.closed(batch)
drive(scheduler, ledger)
print(f"{ledger.num_updates} updates, {scheduler.num_steps} steps, next rate {optimizer.param_groups[0]['lr']:.3e}")
