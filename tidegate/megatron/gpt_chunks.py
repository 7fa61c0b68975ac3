"""Builds a rank's part of a mesh's GPT as Megatron GPTModel chunks, with explicit process groups.

Order:
1. `cpu_stand_in.install()`, where there is no CUDA.
2. The groups.
3. `build_chunks` on all ranks of the mesh: tied embeddings are reduced between the ends of the pipeline during the
   build.

Invariants:
- Nothing is read from parallel_state but the memory buffer of Megatron's attention, which belongs to no group.
- There is one chunk per virtual stage.
- Weights are undefined until they are filled.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tidegate.elastic.plan.layout import Mesh
from tidegate.megatron.attention import GatheringAttention
from tidegate.megatron.norm import RMSNorm
from tidegate.megatron.rope import inverse_frequencies
from tidegate.megatron.stages import StageLayers
from tidegate.model_config import ModelConfig
from tidegate.types import Recompute


def build_chunks(
    config: ModelConfig,
    mesh: Mesh,
    me: int,
    groups: ProcessGroupCollection,
    *,
    padded_vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    recompute: Recompute = Recompute.NONE,
    core_attention: type = GatheringAttention,
) -> list[GPTModel]:
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    layout = mesh.layout
    stage = mesh.coordinates(mesh.ranks.index(me)).stage
    transformer = transformer_config(config, mesh, stage, dtype=dtype, device=device, recompute=recompute)
    chunks = []
    for chunk, sizes in enumerate(mesh.chunks):
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=_layers(config, sizes[stage], core_attention),
            vocab_size=padded_vocab,
            max_sequence_length=config.max_seq_len,
            pre_process=chunk == stage == 0,
            post_process=(chunk, stage) == (layout.vpp - 1, layout.pp - 1),
            parallel_output=True,
            share_embeddings_and_output_weights=config.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=config.rope_theta,
            pg_collection=groups,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        # Megatron's own scaling supports only the factor (common/embeddings/rotary_pos_embedding.py:84).
        model.rotary_pos_emb.inv_freq = inverse_frequencies(config).to(device)
        chunks.append(model.to(device))
    return chunks


def drop_cached_positions() -> None:
    """Free what all chunks of this process have computed of positions. It is computed again when it is needed.

    Megatron keeps it by module (rotary_pos_embedding.py:177), so it keeps the modules of dropped chunks and their
    groups' connections too.
    """
    RotaryEmbedding.forward.cache_clear()


def sequence_parallel(config: ModelConfig, mesh: Mesh) -> bool:
    """transformer/moe/moe_layer.py trains experts under tensor parallelism only with sequence parallelism."""
    return config.num_experts is not None and mesh.layout.tp > 1


def _layers(config: ModelConfig, num_layers: int, core_attention: type) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_submodules(
        num_experts=config.num_experts, qk_layernorm=config.qk_norm, normalization="RMSNorm"
    )
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = core_attention
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec = ModuleSpec(module=TransformerLayer, submodules=layer)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)


def transformer_config(
    config: ModelConfig,
    mesh: Mesh,
    stage: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: Recompute = Recompute.NONE,
) -> TransformerConfig:
    layout = mesh.layout
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=StageLayers(mesh, stage) if layout.pp > 1 else None,
        context_parallel_size=layout.cp,
        sequence_parallel=sequence_parallel(config, mesh),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=False,
        # Avoid mixing up activations and gradients: between two ranks only the order tells messages apart, and with
        # several chunks one batch has messages of both directions (pipeline_parallel/p2p_communication.py:16).
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        **_recompute_settings(recompute),
        **_expert_settings(config, layout.tp, layout.ep),
    )


def _recompute_settings(recompute: Recompute) -> dict[str, object]:
    match recompute:
        case Recompute.NONE:
            return {}
        case Recompute.SELECTIVE:
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case Recompute.FULL:
            # One layer at a time: the recomputed activations then take the memory of one layer.
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _expert_settings(config: ModelConfig, tp: int, ep: int) -> dict[str, object]:
    if config.num_experts is None:
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.experts_per_token,
        "moe_ffn_hidden_size": config.ffn_hidden_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": not config.norm_topk_prob,
        # The only dispatcher without CUDA. It gathers whole shards, so ranks of an ep group need equal shapes.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
    }
