"""Which meshes the provider's model fits, and which layers of a mesh Megatron gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tidegate.elastic.model.provider import ModelProvider
from tidegate.elastic.plan.layout import Edge, LayoutRefused, Mesh
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.stages import StageLayers
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

DENSE = ModelConfig(
    num_layers=6,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=61,
    max_seq_len=16,
)
EXPERTS = replace(DENSE, num_experts=6, experts_per_token=2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=8), r"tp8 does not fit .*linear_qkv.weight: 4 key/value groups .* tp=8; legal tp: 1, 2, 4"),
        (Layout(pp=4), r"6 layers do not divide by pp \* vpp = 4 \* 1; legal pp with vpp=1: 1, 2, 3, 6"),
        (Layout(dp=4, ep=4), r"6 experts do not divide by ep=4; legal ep: 1, 2, 3, 6"),
        (Layout(dp=3, ep=2), r"ep=2 does not divide dp \* cp = 3 \* 1 = 3; legal ep: 1, 3"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_legal_sizes(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutRefused, match=message):
        GptProvider(EXPERTS, padded_vocab=64).mesh(layout, tuple(range(layout.num_ranks)))


def test_a_dense_model_has_no_expert_parallelism() -> None:
    with pytest.raises(LayoutRefused, match=r"ep=2 and the model has no experts; legal ep: 1"):
        GptProvider(DENSE, padded_vocab=64).mesh(Layout(dp=2, ep=2), (0, 1))


def test_a_padded_vocabulary_that_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutRefused, match=r"63 padded vocabulary rows do not divide by tp=2"):
        GptProvider(DENSE, padded_vocab=63).mesh(Layout(tp=2), (0, 1))


def test_stages_are_even_unless_they_are_named() -> None:
    provider: ModelProvider = GptProvider(DENSE, padded_vocab=64, uneven_stages={(4, 1): ((1, 2, 2, 1),)})
    assert provider.mesh(Layout(pp=2, vpp=3), (4, 7)).chunks == ((1, 1), (1, 1), (1, 1))
    assert provider.mesh(Layout(pp=4), (0, 1, 2, 3)).chunks == ((1, 2, 2, 1),)


def test_named_stages_hold_all_layers_of_the_model() -> None:
    provider = GptProvider(DENSE, padded_vocab=64, uneven_stages={(2, 1): ((3, 2),)})
    with pytest.raises(LayoutRefused, match=r"the stages \(\(3, 2\),\) hold 5 layers, the model has 6"):
        provider.mesh(Layout(pp=2), (0, 1))


def test_tied_embeddings_are_one_parameter_at_both_ends() -> None:
    parameters = GptProvider(replace(DENSE, tied_embeddings=True), padded_vocab=64, dtype=torch.bfloat16).parameters()
    assert parameters[0].place is Edge.BOTH
    assert {parameter.itemsize for parameter in parameters} == {2}
    assert "output_layer.weight" not in {parameter.name for parameter in parameters}


@pytest.mark.parametrize("chunks", [((2, 1, 3),), ((1, 1, 1), (0, 2, 1)), ((2, 2, 2),)])
def test_megatron_gets_the_mesh_s_numbers_and_offsets_of_layers(chunks: tuple[tuple[int, ...], ...]) -> None:
    mesh = Mesh(Layout(pp=3, vpp=len(chunks)), (0, 1, 2), chunks)
    homes = list(mesh.homes())
    for stage in range(3):
        layers = StageLayers(mesh, stage)
        for chunk in range(len(chunks)):
            vp_stage = chunk if len(chunks) > 1 else None
            want = [number for number, home in enumerate(homes) if (home.stage, home.chunk) == (stage, chunk)]
            assert layers.get_num_layers_to_build(vp_stage=vp_stage) == len(want)
            if want:
                assert layers.get_layer_offset(vp_stage=vp_stage) == want[0]
            assert layers.get_layer_id_list(vp_stage=vp_stage) == list(
                range(
                    layers.get_layer_offset(vp_stage=vp_stage), layers.get_layer_offset(vp_stage=vp_stage) + len(want)
                )
            )
