"""Carried gradients are planned as a moment is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.unit.elastic import cutter
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.gradients import with_gradients
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import DistributedOptimizer, StateKind
from tidegate.elastic.plan.plan import Plan
from tidegate.elastic.plan.planner import Planner
from tidegate.types import Layout

SHAPE = GptShape(4, 16, 24, 4, 4, 4, 61, 64, tied_embeddings=True)
PARAMETERS = gpt_parameters(SHAPE)


def state(layout: Layout, ranks: tuple[int, ...]) -> State:
    mesh = Mesh(layout, ranks, even_chunks(SHAPE.num_layers, pp=layout.pp, vpp=layout.vpp))
    return State(mesh, DistributedOptimizer(cutter.shares(mesh, PARAMETERS, per_bucket=5)))


def of_kind(values: Iterable[Any], kind: StateKind) -> list[Any]:
    return [value for value in values if value.kind is kind]


@pytest.mark.parametrize(
    ("source", "target"),
    [(Layout(dp=2), Layout(tp=2)), (Layout(pp=2), Layout(dp=2)), (Layout(tp=2), Layout(pp=2))],
    ids=["dp2 to tp2", "pp2 to dp2", "tp2 to pp2"],
)
def test_gradients_go_the_way_of_a_moment(source: Layout, target: Layout) -> None:
    plan = Planner(PARAMETERS, state(source, (0, 1)), state(target, (2, 0))).whole()
    carrying = Plan(tuple(map(with_gradients, plan.parts)))

    for part, before in zip(carrying.parts, plan.parts, strict=True):
        for field in ("source_holdings", "target_holdings", "local", "sends", "receives"):
            found, whole = getattr(part, field), getattr(before, field)
            moments, gradients = of_kind(whole, StateKind.EXP_AVG), of_kind(found, StateKind.GRADIENT)
            assert [entry for entry in found if entry.kind is not StateKind.GRADIENT] == list(whole)
            assert len(gradients) == len(moments)
            for gradient, moment in zip(gradients, moments, strict=True):
                assert str(gradient).replace("GRADIENT: 'gradient'", "EXP_AVG: 'exp_avg'") == str(moment)
    assert any(of_kind(part.receives, StateKind.GRADIENT) for part in carrying.parts)
