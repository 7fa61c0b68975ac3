"""A set of weights is accepted whole or refused. Padding rows are kept but never read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.rollout.embedded.weights import load_weights, tensor_checksum
from services.rollout.engine import SamplingParams, WeightsRefused
from tests.unit.rollout.tiny_models import TINY, engine_of, random_weights, request_of, run
from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
Tensors = list[tuple[str, torch.Tensor]]


def changed(name: str, tensor: torch.Tensor) -> Tensors:
    return [(key, tensor if key == name else value) for key, value in random_weights(TINY)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        pytest.param(random_weights(TINY)[1:], f"1 of 15 tensors are missing: {EMBEDDING}", id="a name is missing"),
        pytest.param([], "15 of 15 tensors are missing: .* and 11 more", id="an empty set"),
        pytest.param([("lm_head.weight", torch.zeros(1))], "unknown tensor 'lm_head.weight'", id="an unknown name"),
        pytest.param(random_weights(TINY) * 2, f"tensor '{EMBEDDING}' came twice", id="a name twice"),
        pytest.param(changed(FC1, torch.zeros(80, 48)), r"shape \[80, 48\], want \[160, 48\]", id="a shard"),
        pytest.param(
            changed(FC1, torch.zeros(161, 48)), r"shape \[161, 48\], want \[160, 48\]:", id="padding in a layer"
        ),
        pytest.param(changed(OUTPUT, torch.zeros(60, 48)), r"\[61, 48\] or more rows", id="too few vocabulary rows"),
        pytest.param(changed(FC1, torch.zeros(160, 48).double()), "is torch.float64; .* cast it", id="fp64"),
    ],
)
def test_a_set_that_is_not_the_models_is_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(WeightsRefused, match=message):
        load_weights(TINY, version=2, tensors=tensors)


def test_weights_in_bf16_are_widened_and_keep_their_values() -> None:
    rounded = [(name, tensor.bfloat16()) for name, tensor in random_weights(TINY)]
    held = load_weights(TINY, version=2, tensors=rounded).named
    for name, tensor in rounded:
        assert held[name].dtype == torch.float32
        assert torch.equal(held[name], tensor.float())


def test_an_output_layer_for_a_tied_model_is_refused() -> None:
    with pytest.raises(WeightsRefused, match=f"unknown tensor '{OUTPUT}'"):
        load_weights(replace(TINY, tied_embeddings=True), version=1, tensors=random_weights(TINY))


@pytest.mark.parametrize("tied", [False, True])
def test_padding_rows_take_no_probability_whatever_they_hold(tied: bool) -> None:
    config = replace(TINY, tied_embeddings=tied)
    requests = [request_of(f"r{seed}", sampling=SamplingParams(max_new_tokens=30, seed=seed)) for seed in range(4)]
    engine = engine_of(config)
    want = run(engine, *requests)
    engine.update_weights(1, random_weights(config, padding_rows=0))
    assert run(engine, *requests) == want


def test_held_weights_are_a_copy_that_later_writes_to_the_source_do_not_reach() -> None:
    source = random_weights(TINY)
    engine = engine_of(TINY)
    engine.update_weights(1, source)
    before = dict(engine.checksums())
    for _, tensor in source:
        tensor.zero_()
    assert engine.checksums() == before


def test_a_checksum_is_of_the_elements_in_row_major_order_whatever_the_strides() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert tensor_checksum(tensor.t().contiguous().t()) == tensor_checksum(tensor)
    assert tensor_checksum(tensor.t()) != tensor_checksum(tensor)


def test_a_source_that_fails_midway_leaves_the_old_weights() -> None:
    engine = engine_of(TINY)
    before = dict(engine.checksums())

    def torn() -> Tensors:
        raise ConnectionResetError("the snapshot's node went away")

    with pytest.raises(ConnectionResetError):
        engine.update_weights(2, (pair for part in (random_weights(TINY)[:3], None) for pair in part or torn()))
    assert (engine.version, engine.checksums()) == (1, before)
