"""Recomputed activations give the same gradients to the bit, and keep less memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankServer, Results
from tidegate.types import Recompute

LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "virtual stages under tensor parallelism": ({"tp": 2, "pp": 2, "vpp": 2}, False),
    "sequences that are cut": ({"tp": 2, "cp": 2}, False),
    "experts": ({"tp": 2, "ep": 2, "dp": 2}, True),
}
EVERYDAY = "virtual stages under tensor parallelism"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == EVERYDAY else pytest.mark.long) for name in LAYOUTS]
)
def found(request: pytest.FixtureRequest, ranks: RankServer) -> list[Results]:
    layout, experts = LAYOUTS[request.param]
    cases: dict[str, dict[str, Any]] = {
        recompute: {
            "model": {"experts": experts, "bf16": False, "uneven": False, "recompute": recompute},
            "layout": layout,
        }
        for recompute in Recompute
    }
    return ranks.run("tests.integration.megatron.axis_ranks:gradients", 4, {"cases": cases})


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_gradients_with_recomputation_equal_those_without_to_the_bit(
    found: list[Results], recompute: Recompute
) -> None:
    for rank in found:
        want, got = _of(rank, "none"), _of(rank, recompute)
        assert got.keys() == want.keys()
        assert any(key.startswith("grad/") and want[key].any() for key in want)
        assert [key for key in want if key != "saved_bytes" and got[key].tobytes() != want[key].tobytes()] == []


def test_more_recomputation_keeps_fewer_bytes(found: list[Results]) -> None:
    none, selective, full = (int(_of(found[-1], recompute)["saved_bytes"]) for recompute in Recompute)
    assert 0 < full < selective < none


def _of(rank: Results, case: str) -> Results:
    return {key.removeprefix(f"{case}/"): value for key, value in rank.items() if key.startswith(f"{case}/")}
