"""A torch loop with a rate that follows the samples. Each batch is cut into updates of at most `CAP` tokens."""

from __future__ import annotations

import torch

from tidegate.lr_progress import LrLedger, LrRules
from tidegate.lr_schedule import Decay, LrSchedule

CAP, BATCHES = 64, 12
ledger = LrLedger(LrSchedule(1e-2, budget=2 * BATCHES, warm_up=3, decay=Decay.COSINE), LrRules(logical_minibatch=8))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for batch in range(BATCHES):
    lengths = torch.randint(4, 33, (16,)).tolist()
    ledger = ledger.opened(batch, len(lengths))  # 16 samples are 2 steps of 8, in any number of updates
    while pending := list(ledger.open_batch.pending if ledger.open_batch else []):
        count = max(1, sum(sum(lengths[unit] for unit in pending[: n + 1]) <= CAP for n in range(len(pending))))
        inputs = torch.randn(count, 4)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = ledger.rate
        optimizer.step()
        ledger = ledger.committed_update(batch, str(pending[0]), ledger.next_units(count))
    ledger = ledger.closed(batch)
print(f"{ledger.num_updates} updates, {ledger.progress} of {ledger.schedule.budget} steps, next rate {ledger.rate}")
