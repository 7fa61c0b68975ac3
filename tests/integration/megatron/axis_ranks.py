"""One forward and backward pass of a tiny model in one mesh after another, in one world as large as the widest mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from tests.integration.elastic.world_ranks import open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.world import Membership, World
from tidegate.elastic.plan.layout import Mesh
from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.groups import megatron_groups, prepare_megatron
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.schedule import run_micro_batches
from tidegate.model_config import ModelConfig
from tidegate.types import Layout, Recompute

CPU = torch.device("cpu")
DENSE = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=61,
    max_seq_len=16,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)
EXPERTS = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=61,
    max_seq_len=16,
    num_experts=4,
    experts_per_token=2,
    qkv_bias=True,
    qk_norm=True,
)
UNEVEN = {(3, 1): ((2, 1, 1),), (4, 1): ((1, 0, 2, 1),), (2, 2): ((1, 2), (0, 1))}
SHAPES = ((2, 16), (2, 16), (1, 8), (1, 8), (2, 16), (2, 16))
"""The shapes of the micro-batches. Two replicas get equal shapes, three each, so that interleaved stages need
a filler.
"""


def provider_of(*, experts: bool, bf16: bool, uneven: bool, recompute: str = "none") -> GptProvider:
    return GptProvider(
        EXPERTS if experts else DENSE,
        padded_vocab=64,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        uneven_stages=UNEVEN if uneven else {},
        recompute=Recompute(recompute),
    )


def gradients(context: RankContext, *, cases: dict[str, dict[str, Any]]) -> Results:
    """By case: this rank's initial parameters and reduced gradients, and the loss where this rank computes it.

    On the last stage also the bytes that the first forward pass kept for the backward pass.
    """
    store = open_store(context, timeout_s=context.timeout_s)
    everyone = Membership(0, tuple(range(context.world_size)))
    world = World.join(everyone, me=context.rank, store=store, device=CPU, timeout_s=context.timeout_s)
    results: Results = {}
    for name, case in cases.items():
        provider = provider_of(**case["model"])
        layout = Layout(**case["layout"])
        mesh = provider.mesh(layout, tuple(range(layout.num_ranks)))
        groups = megatron_groups(world, mesh)
        if groups is not None:
            found = _one_backward(provider, mesh, context.rank, groups)
            results |= {f"{name}/{key}": value for key, value in found.items()}
    world.barrier(everyone.members)
    world.leave()
    return results


def _one_backward(provider: GptProvider, mesh: Mesh, me: int, groups: ProcessGroupCollection) -> Results:
    prepare_megatron(groups, seed=0)
    chunks = provider.build(mesh, me, groups, device=CPU)
    provider.initialise(chunks, mesh, me, seed=3)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [
        DistributedDataParallel(get_model_config(chunk), ddp_config, chunk, pg_collection=groups) for chunk in chunks
    ]
    get_model_config(chunks[0]).finalize_model_grads_func = _finalize
    at = mesh.coordinates(mesh.ranks.index(me))
    own = range(at.dp, len(SHAPES), mesh.layout.dp)
    saved_bytes, saved_until_loss = 0, 0

    def count(saved: torch.Tensor) -> torch.Tensor:
        nonlocal saved_bytes
        saved_bytes += saved.nbytes
        return saved

    def on_logits(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
        log_probs_BS = token_log_probs(
            logits_BQV, tokens_BS, vocab_size=provider.config.vocab_size, temperature=0.9, groups=groups
        )
        nonlocal saved_until_loss
        saved_until_loss = saved_until_loss or saved_bytes
        generator = torch.Generator().manual_seed(own[number])
        loss = (log_probs_BS * torch.rand(tokens_BS.shape, generator=generator)).sum()
        return loss, float(loss.detach())

    batches = [_tokens(number) for number in own]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        kept = run_micro_batches(wrapped, batches, on_logits, groups=groups, device=CPU, forward_only=False)
    results: Results = {"loss": np.array(kept)} if at.tp == at.cp == 0 else {}
    results["saved_bytes"] = np.array(saved_until_loss)
    for name, parameter in provider.local_parameters(wrapped, mesh, me):
        end = "" if f"param/{name}" not in results else "/tied"
        results[f"param/{name}{end}"] = parameter.detach().float().numpy().copy()
        main_grad: torch.Tensor = getattr(parameter, "main_grad")  # noqa: B009 - Megatron sets it
        results[f"grad/{name}{end}"] = main_grad.numpy().copy()
    return results


def _finalize(chunks: Sequence[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    finalize_model_grads(list(chunks), None, **kwargs)


def _tokens(number: int) -> TokenBatch:
    tokens = np.random.default_rng(number).integers(0, DENSE.vocab_size, SHAPES[number])
    return TokenBatch(tuple(range(SHAPES[number][0])), tokens)
