"""A component works if and only if it has GPUs."""

from __future__ import annotations

import pytest

from services.scheduler.state.components import Component, Down, Suspended, Working
from services.scheduler.state.values import Placed
from tidegate.types import GpuId, Grant, Layout, Token

GPUS = (GpuId("n0/0"), GpuId("n0/1"))
GRANTS = tuple(Grant(gpu, Token(1, 1)) for gpu in GPUS)
PLACED = Placed(GPUS, Layout(dp=2))


def test_no_component_works_without_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"works in layout .* without a GPU"):
        Working((), PLACED)


@pytest.mark.parametrize("case", [Down(), Suspended(), Suspended(PLACED, 1), Working(GRANTS, PLACED)])
def test_a_component_has_a_layout_exactly_while_it_has_gpus(case: Down | Working | Suspended) -> None:
    component = Component(state=case)

    assert component.is_up is bool(component.grants)
    assert component.is_up is (component.layout is not None)
    assert component.is_up is (case == Working(GRANTS, PLACED))


def test_only_a_component_that_works_lacks_ranks() -> None:
    at_work = Component(state=Working(GRANTS, PLACED))

    assert not at_work.lacks_ranks
    assert at_work.with_grants(GRANTS[:1]).lacks_ranks
    assert not Component(state=Suspended(PLACED)).lacks_ranks


def test_a_component_that_loses_its_last_gpu_is_down() -> None:
    assert Component(state=Working(GRANTS, PLACED)).with_grants(()) == Component(state=Down())
