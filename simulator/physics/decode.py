"""An engine's costs from the model's shape and the GPU: decode step, cache and prefill. Pure.

    step_s     = base + per_sequence * running + per_kv_token * kv_tokens + experts * (1 - (1 - k / E) ^ running)
    base       = host + layers * (launches, and an all-reduce above TP 1) + always read weights / (n * bandwidth)
    experts    = weights of all experts / (n * bandwidth)
    per_sequence, per_kv_token     arithmetic and sampling; bytes of keys and values / (n * bandwidth)

n is the engine's GPUs, k of E experts compute on a token. A batch reads an expert if any of its tokens goes there.

Invariants:
- The kernel times of dense models on H100 and H200 are within 15 % of AIConfigurator's, and those of models with
  experts within 20 %. [test_decode_law: aiconfigurator]
"""

from __future__ import annotations

from simulator.cost_model import EngineCosts
from simulator.physics.memory import Memory
from simulator.physics.sections import PhysicsSection
from simulator.physics.shapes import WEIGHT_BYTES, ShapeSection


def engine_costs(physics: PhysicsSection, given: EngineCosts, memory: Memory, *, context_tokens: float) -> EngineCosts:
    """`given` has what no physics knows: the engine's GPUs, its slots, and shares. `context_tokens`: of a prefill."""
    own, shape, gpu = physics.decode, physics.named_shape(), physics.named_gpu()
    num_gpus = given.gpus_per_engine
    weights_per_s = num_gpus * gpu.memory_bytes_per_s * own.weight_bandwidth_share
    cache_per_s = memory.kv_parts(num_gpus) * gpu.memory_bytes_per_s * own.kv_bandwidth_share
    layer_s = own.layer_s + (own.all_reduce_s if num_gpus > 1 else 0.0)
    imbalance = own.spread_experts_imbalance if num_gpus >= own.spread_experts_from_gpus else 1.0
    if shape.num_experts:
        layer_s += own.expert_layer_s
    arithmetic_s = _token_flops(shape) / (num_gpus * gpu.flops_per_s)
    prefill_s = (_token_flops(shape) + _attention_flops(shape, context_tokens)) / (num_gpus * gpu.flops_per_s)
    efficiency = own.expert_prefill_efficiency if shape.num_experts else own.prefill_efficiency
    computed = {
        "step_floor_s": 0.0,
        "step_base_s": own.host_s + shape.num_layers * layer_s + _always_read_bytes(shape) / weights_per_s,
        "step_per_sequence_s": own.arithmetic_share * arithmetic_s + own.sampling_s,
        "step_per_kv_token_s": shape.kv_bytes / cache_per_s,
        "step_experts_s": imbalance * WEIGHT_BYTES * shape.expert_parameters / weights_per_s,
        "expert_share": shape.experts_per_token / shape.num_experts if shape.num_experts else 0.0,
        "kv_capacity_tokens": memory.cache_tokens(num_gpus),
        "prefill_tokens_per_s": efficiency / prefill_s,
    }
    return EngineCosts.model_validate(given.model_dump() | computed)


def _always_read_bytes(shape: ShapeSection) -> int:
    """The weights that a step of any batch reads: layers without experts, and the table of the output."""
    return WEIGHT_BYTES * (shape.dense_parameters + shape.embedding_parameters)


def _token_flops(shape: ShapeSection) -> float:
    return 2.0 * (shape.dense_parameters + shape.active_expert_parameters + shape.embedding_parameters)


def _attention_flops(shape: ShapeSection, context: float) -> float:
    """Of a token of a prefill of so many tokens: the mask is causal."""
    return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
