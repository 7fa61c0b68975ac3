"""A small GPT from Megatron on the CPU with its optimizer, for the examples. Any Megatron script has such a set-up."""

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


def model_and_optimizer() -> tuple[Any, Any]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True)
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=16)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.0, use_distributed_optimizer=True), [model])


def forward_backward(model: Any, tokens: torch.Tensor) -> float:
    """The loss of predicting each next token. Its gradients are ready for the optimizer."""
    model.zero_grad_buffer()
    position_ids = torch.arange(tokens.size(1)).expand_as(tokens)
    loss = model(tokens, position_ids, None, labels=tokens.roll(-1, 1))[:, :-1].mean()
    loss.backward()
    finalize_model_grads([model])
    return float(loss)
