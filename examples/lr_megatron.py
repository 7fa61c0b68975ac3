"""A Megatron GPT whose rate is a ledger's: 3 updates a batch, where 4 steps were planned, end the budget exactly."""

from __future__ import annotations

from tidegate.elastic import local

local.on_cpu()

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch._C._distributed_c10d import HashStore

from tidegate.lr_progress import LrLedger, LrRules
from tidegate.lr_schedule import Decay, LrSchedule
from tidegate.megatron.lr import drive, param_scheduler


def model_and_optimizer() -> tuple[Any, Any]:  # as any Megatron script has them
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True)
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=16)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.0, use_distributed_optimizer=True), [model])


def train(model: Any, optimizer: Any, schedule: LrSchedule) -> None:
    ledger = LrLedger(schedule, LrRules(logical_minibatch=32))
    scheduler = param_scheduler(optimizer, schedule, weight_decay=0.01)
    for batch in range(10):
        tokens = (torch.randint(16, (128, 1)) + torch.arange(16)) % 16  # counting up
        ledger = ledger.opened(batch, num_units=128)  # 4 steps
        for units in (range(50), range(50, 100), range(100, 128)):
            model.zero_grad_buffer()
            own = tokens[units.start : units.stop]
            loss = model(own, torch.arange(16).expand_as(own), None, labels=own.roll(-1, 1))[:, :-1].mean()
            loss.backward()
            finalize_model_grads([model])
            drive(scheduler, ledger)  # in place of scheduler.step(...)
            optimizer.step()
            steps, rate = float(ledger.progress), optimizer.param_groups[0]["lr"]
            print(f"{steps} of {schedule.budget} steps: rate {rate}, loss {loss.item():.4f}")
            ledger = ledger.committed_update(batch, str(units.start), units)
        ledger = ledger.closed(batch)
    drive(scheduler, ledger)
    print(f"{ledger.num_updates} updates, {scheduler.num_steps} steps, next rate {optimizer.param_groups[0]['lr']:.3e}")


if __name__ == "__main__":
    train(*model_and_optimizer(), LrSchedule(1e-2, budget=40, warm_up=4, decay=Decay.LINEAR, minimum=1e-3))
