"""For any cap, replicas and order, the gradients of the micro-batches add up to those of one batch, in fp64.

The one batch is the reference's, which has neither batches nor padding. The micro-batches are the actor's, with its
token weights and its loss. The model is the reference's, row by row, padding included.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.actor.grpo import Aggregation, GrpoSettings, minibatch_scale, token_weights
from services.actor.grpo_loss import grpo_loss
from services.actor.grpo_minibatch import GrpoMinibatch
from services.actor.microbatch import TrainBatch, TrainSample, packed_samples, train_batches
from tests.integration.megatron import reference, small_job
from tests.integration.megatron.reference import Weights
from tidegate.megatron.batching import ReplicaPlace
from tidegate.megatron.packing import TokenCap
from tidegate.model_config import ModelConfig

TOLERANCE = 1e-6
"""Weights, advantages and old log-probabilities reach the loss in fp32."""
MODEL = ModelConfig(1, 8, 12, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=61, max_seq_len=64)
SAMPLES = small_job.recorded_samples()
LONGEST = max(len(sample.tokens) for sample in SAMPLES)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def drawn_weights() -> Weights:
    generator = torch.Generator().manual_seed(5)
    layer, size = "decoder.layers.0.", MODEL.hidden_size
    shapes = {
        "embedding.word_embeddings.weight": (MODEL.vocab_size, size),
        f"{layer}input_layernorm.weight": (size,),
        f"{layer}self_attention.linear_qkv.weight": (MODEL.qkv_size, size),
        f"{layer}self_attention.linear_proj.weight": (size, MODEL.num_heads * MODEL.head_dim),
        f"{layer}pre_mlp_layernorm.weight": (size,),
        f"{layer}mlp.linear_fc1.weight": (2 * MODEL.ffn_hidden_size, size),
        f"{layer}mlp.linear_fc2.weight": (size, MODEL.ffn_hidden_size),
        "decoder.final_layernorm.weight": (size,),
    }
    return {
        name: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def of_micro_batches(samples: Sequence[TrainSample], grpo: GrpoSettings, batches: Sequence[TrainBatch]) -> Weights:
    """The gradients of the micro-batches, added up and scaled as the ranks do."""
    weights = {name: tensor.requires_grad_() for name, tensor in drawn_weights().items()}
    total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for batch in batches:
        rows = [
            reference.next_log_probs(MODEL, weights, tokens_S, small_job.TEMPERATURE)
            for tokens_S in torch.from_numpy(batch.batch.tokens_BS)
        ]
        log_probs_BS = torch.nn.functional.pad(torch.stack(rows), (1, 0))
        loss = grpo_loss(log_probs_BS, batch, grpo).loss
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            total[name] += gradient
    return {name: tensor * minibatch_scale(samples, grpo) for name, tensor in total.items()}


def of_one_batch(samples: list[TrainSample], grpo: GrpoSettings) -> Weights:
    assert grpo.max_new_tokens is not None
    return reference.grpo(
        MODEL,
        drawn_weights(),
        samples,
        temperature=small_job.TEMPERATURE,
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        kl_coefficient=grpo.kl_coefficient,
        aggregation=grpo.aggregation.value,
        old_log_probs=grpo.old_log_probs.value,
        importance_cap=grpo.importance_cap,
        max_new_tokens=grpo.max_new_tokens,
    ).gradients


def cut(samples: Sequence[TrainSample], grpo: GrpoSettings, cap: TokenCap, place: ReplicaPlace) -> list[TrainBatch]:
    """The micro-batches of all replicas."""
    weights = token_weights(samples, grpo)
    places = [replace(place, replica=replica) for replica in range(place.num_replicas)]
    return [batch for each in places for batch in train_batches(samples, weights, packed_samples(samples, cap, each))]


@settings(max_examples=12)
@given(
    cap=st.builds(
        TokenCap,
        max_tokens=st.integers(8, 12 * LONGEST),
        token_cost=st.just(30),
        pass_cost=st.none() | st.integers(0, 20_000),
    ),
    place=st.builds(
        ReplicaPlace,
        num_replicas=st.sampled_from([1, 2, 4]),
        num_shards=st.sampled_from([None, 4, 8]),
        multiple=st.integers(1, 3),
        alike=st.booleans(),
    ),
    masked=st.sets(st.integers(0, len(SAMPLES) - 1), max_size=len(SAMPLES) - 1),
    aggregation=st.sampled_from(AGGREGATIONS),
    draw=st.randoms(use_true_random=False),
)
@example(
    TokenCap(8, token_cost=30),
    ReplicaPlace(num_replicas=4),
    set(range(1, len(SAMPLES))),
    AGGREGATIONS[1],
    random.Random(0),
)
def test_gradients_do_not_depend_on_cap_replicas_grouping_or_order(
    cap: TokenCap, place: ReplicaPlace, masked: set[int], aggregation: str, draw: random.Random
) -> None:
    samples = [replace(sample, masked=index in masked) for index, sample in enumerate(SAMPLES)]
    grpo = small_job.grpo_settings(aggregation=aggregation)
    want = of_one_batch(samples, grpo)
    mixed = draw.sample(samples, len(samples))
    got = of_micro_batches(mixed, grpo, cut(mixed, grpo, cap, place))
    scale = torch.cat([gradient.flatten() for gradient in want.values()]).norm()
    for name, gradient in got.items():
        assert (gradient - want[name]).norm() <= TOLERANCE * scale, name


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_minibatch_whose_every_sample_is_masked_has_no_gradient(aggregation: Aggregation) -> None:
    samples = [replace(sample, masked=True) for sample in SAMPLES]
    grpo = small_job.grpo_settings(aggregation=aggregation.value)
    got = of_micro_batches(samples, grpo, cut(samples, grpo, TokenCap(64), ReplicaPlace(num_replicas=2)))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in got.values())


def test_a_minibatch_is_packed_once_for_its_micro_batches_and_its_metrics() -> None:
    place = ReplicaPlace(replica=1, num_replicas=2)
    minibatch = GrpoMinibatch(SAMPLES, small_job.trainer_settings(max_tokens=64))
    batches = minibatch.micro_batches(place)
    together = minibatch.packed(place)
    assert together is minibatch.packed(place)
    assert [batch.batch.sequences for batch in batches] == together.shares[1]
