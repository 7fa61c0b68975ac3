"""A minibatch that comes in portions gives the update of the whole minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import effort
from tests.integration.megatron.portion_ranks import FIGURES
from tests.ranks import RankServer, Results

RANKS = "tests.integration.megatron.portion_ranks"
NUM_SHARDS = 4
WHOLE: list[list[int]] = [[], [], []]
CUTS = {
    "pairs": [[2, 2], [2, 2, 2], [2]],
    "one at a time": [[1] * 6, [1] * 5, [1]],
    "unequal": [[3], [1, 4], [5, 1]],
}
"""By update, the bundles of each portion before the last."""

Run = Callable[..., list[Results]]


@pytest.fixture(scope="module")
def run(ranks: RankServer) -> Run:
    """The figures and the state of each rank. Each run is made once."""
    made: dict[str, list[Results]] = {}

    def run_once(layout: dict[str, int], **arguments: Any) -> list[Results]:
        call = {"layout": layout, "num_logical_shards": NUM_SHARDS, "cuts": WHOLE, **arguments}
        if repr(call) not in made:
            num_ranks = math.prod(size for axis, size in layout.items() if axis not in ("vpp", "ep"))
            made[repr(call)] = ranks.run(f"{RANKS}:updates", num_ranks, call, timeout_s=90.0)
        return made[repr(call)]

    return run_once


def assert_same_bits(got: list[Results], want: list[Results]) -> None:
    for mine, wanted in zip(got, want, strict=True):
        assert mine.keys() == wanted.keys()
        assert [name for name in wanted if mine[name].tobytes() != wanted[name].tobytes()] == []


@pytest.mark.parametrize("cut", effort.cases(CUTS, always=["unequal"]))
def test_a_minibatch_in_portions_has_the_bits_of_a_whole_minibatch(run: Run, cut: str) -> None:
    assert_same_bits(run({"dp": 2}, tied=True, cuts=CUTS[cut]), run({"dp": 2}, tied=True))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ({}, {}),
        ({"tp": 2}, {"tied": True}),
        ({"pp": 2}, {"tied": True}),
        ({"tp": 2, "dp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"tied": True, "max_tokens": 160}),
        ({"dp": 4}, {"max_tokens": 160}),
    ],
    ids=["one rank", "tp2", "pp2", "tp2 dp2", "pp2 dp2 under a token cap", "dp4 under a token cap"],
)
@pytest.mark.parametrize("cut", ["pairs", "one at a time"])
def test_in_every_layout_portions_have_the_bits_of_a_whole_minibatch(
    run: Run, layout: dict[str, int], arguments: dict[str, Any], cut: str
) -> None:
    assert_same_bits(run(layout, cuts=CUTS[cut], **arguments), run(layout, **arguments))


@pytest.mark.parametrize(
    "layout", effort.cases([{"dp": 4}, {"pp": 2, "dp": 2}], always=[{"pp": 2, "dp": 2}]), ids=["dp4", "pp2 dp2"]
)
def test_portions_in_another_layout_have_the_bits_of_a_whole_minibatch_on_one_rank(
    run: Run, layout: dict[str, int]
) -> None:
    got, want = run(layout, tied=True, cuts=CUTS["pairs"])[0], run({}, tied=True)[0]
    for name in FIGURES:
        assert got[name].tobytes() == want[name].tobytes(), name


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("aggregation", effort.cases(AGGREGATIONS, always=["token-mean", "seq-mean-token-sum-norm"]))
def test_without_reproducible_mode_portions_come_close_to_a_whole_minibatch(run: Run, aggregation: str) -> None:
    arguments = {"num_logical_shards": None, "aggregation": aggregation}
    got, want = run({"dp": 2}, cuts=CUTS["unequal"], **arguments)[0], run({"dp": 2}, **arguments)[0]
    for name in FIGURES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ({"tp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"max_tokens": 160}),
        ({"cp": 2}, {}),
        ({"ep": 2, "dp": 2}, {"experts": True}),
    ],
    ids=["tp2", "pp2 dp2 under a token cap", "cp2", "experts"],
)
def test_without_reproducible_mode_portions_come_close_in_every_layout(
    run: Run, layout: dict[str, int], arguments: dict[str, Any]
) -> None:
    arguments = {"num_logical_shards": None, **arguments}
    got, want = run(layout, cuts=CUTS["pairs"], **arguments)[0], run(layout, **arguments)[0]
    for name in FIGURES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("num_logical_shards", [NUM_SHARDS, None], ids=["reproducible", "plain"])
def test_portions_that_are_dropped_by_a_reshard_leave_no_trace(
    ranks: RankServer, run: Run, num_logical_shards: int | None
) -> None:
    call = {"num_logical_shards": num_logical_shards}
    want = run({"dp": 2}, tied=True, **call)[0]
    for got in ranks.run(f"{RANKS}:dropped_by_a_reshard", 2, call, timeout_s=60.0):
        assert int(got["dropped"]) == 2
        for name in FIGURES:
            if num_logical_shards is None:
                np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
            else:
                assert got[name].tobytes() == want[name].tobytes(), name
