"""The ranges of an optimizer that is not built are those of Megatron's buffers.

Every size is a multiple of 512, so that the buffers' padding equals the cutter's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.elastic import cutter
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import DistributedOptimizer
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.plan.ranges import with_optimizer
from tidegate.types import Layout

ONE_BUCKET = 10**9
DENSE = GptShape(
    num_layers=5,
    hidden_size=512,
    ffn_hidden_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=30,
    padded_vocab_size=32,
    qkv_bias=True,
)
CASES = {
    "data parallel": (DENSE, Layout(dp=4), ((5,),)),
    "tensor parallel": (DENSE, Layout(tp=2, dp=2), ((5,),)),
    "uneven stages": (DENSE, Layout(pp=2, dp=2), ((3, 2),)),
    "tied embeddings at both ends": (replace(DENSE, tied_embeddings=True), Layout(pp=2, dp=2), ((2, 3),)),
    "virtual stages": (DENSE, Layout(pp=2, vpp=2), ((1, 1), (2, 1))),
    "experts": (replace(DENSE, num_experts=4), Layout(dp=4, ep=2), ((5,),)),
}


@pytest.mark.parametrize("case", CASES)
def test_ranges_are_those_of_buffers_in_one_bucket(case: str) -> None:
    shape, layout, chunks = CASES[case]
    parameters = gpt_parameters(shape)
    mesh = Mesh(layout, tuple(range(layout.num_ranks)), chunks)
    optimizer = with_optimizer(parameters, mesh).optimizer
    assert isinstance(optimizer, DistributedOptimizer)
    want = cutter.shares(mesh, parameters, per_bucket=ONE_BUCKET)
    assert {rank: dict(shares) for rank, shares in optimizer.ranges.items()} == want


@pytest.mark.parametrize("case", CASES)
def test_a_reshard_between_computed_ranges_can_be_planned(case: str) -> None:
    shape, layout, chunks = CASES[case]
    parameters = gpt_parameters(shape)
    source = with_optimizer(parameters, Mesh(layout, tuple(range(layout.num_ranks)), chunks))
    target = with_optimizer(parameters, Mesh(Layout(dp=2), (1, 0), ((5,),)))
    plan = Planner(parameters, source, target).whole()
    assert plan.received_bytes > 0
