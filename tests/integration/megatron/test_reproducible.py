"""Runs in reproducible mode have the same bits for every number of replicas and stages, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import effort
from tests.ranks import RankServer, Results

JOBS = "tests.integration.megatron.actor_trainer_ranks"
RUNS = "tests.integration.megatron.reproducible_ranks"
NUM_SHARDS = 4
REPORTED = ("sums", "grad_norm")

Run = Callable[..., Results]


@pytest.fixture(scope="module")
def run(ranks: RankServer) -> Run:
    """All numbers of a run by name: the logical state, and the numbers that all ranks report alike. Each run
    is made once.
    """
    made: dict[str, Results] = {}

    def run_once(layout: dict[str, int], **arguments: Any) -> Results:
        call = {"layout": layout, "num_updates": 3, "num_logical_shards": NUM_SHARDS, **arguments}
        if repr(call) not in made:
            num_ranks = math.prod(size for axis, size in layout.items() if axis != "vpp")
            # Eight ranks on two cores take seconds an update while other tests run.
            found = ranks.run(f"{RUNS}:updates", num_ranks, call, timeout_s=60.0 + 5 * call["num_updates"])
            # Where weights are cut, ranks hold different elements under one name, so compare only reported numbers.
            cut = layout.get("tp", 1) > 1
            made[repr(call)] = whole([{name: rank[name] for name in REPORTED} for rank in found] if cut else found)
        return made[repr(call)]

    return run_once


def whole(ranks: list[Results]) -> Results:
    """Join the ranks' parts. Raises AssertionError on a hole, or where two ranks hold different values of an
    element.
    """
    together: Results = {}
    for name in sorted({name for rank in ranks for name in rank}):
        parts = [rank[name] for rank in ranks if name in rank]
        value = parts[0].copy()
        for part in parts[1:]:
            both = ~np.isnan(value) & ~np.isnan(part)
            np.testing.assert_array_equal(value[both], part[both], err_msg=name)
            value = np.where(np.isnan(value), part, value)
        assert not np.isnan(value).any(), f"no rank holds all of {name}"
        together[name] = value
    return together


def different(got: Results, want: Results) -> list[str]:
    assert got.keys() == want.keys()
    return [name for name in want if got[name].tobytes() != want[name].tobytes()]


def assert_close(got: Results, want: Results) -> None:
    """Losses, whose terms are about 1, and norms must agree within a ten-thousandth."""
    for name in REPORTED:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4, err_msg=name)


SAME_BITS = {
    "dp4": ({"dp": 4}, {}),
    "pp2 vpp2": ({"pp": 2, "vpp": 2}, {}),
    "tied dp2": ({"dp": 2}, {"tied": True}),
    "tied pp2 dp2": ({"pp": 2, "dp": 2}, {"tied": True}),
    "tied pp4": ({"pp": 4}, {"tied": True}),
    "tied, in bf16, pp2 vpp2 dp2": ({"pp": 2, "vpp": 2, "dp": 2}, {"tied": True, "bf16": True}),
    "under a token cap, pp2 vpp2 dp2": ({"pp": 2, "vpp": 2, "dp": 2}, {"max_tokens": 32}),
}


QUICK = ("tied pp2 dp2", "tied, in bf16, pp2 vpp2 dp2", "under a token cap, pp2 vpp2 dp2")


@pytest.mark.parametrize(
    ("layout", "arguments"),
    effort.cases(SAME_BITS.values(), always=[SAME_BITS[name] for name in QUICK]),
    ids=SAME_BITS,
)
def test_a_run_has_the_bits_of_one_rank_s(run: Run, layout: dict[str, int], arguments: dict[str, Any]) -> None:
    want, got = run({}, **arguments), run(layout, **arguments)
    assert np.all(want["grad_norm"] > 0.05), "the norm must clip the gradients"
    assert different(got, want) == []


def test_the_actor_s_trainer_has_the_bits_of_one_rank_s(ranks: RankServer) -> None:
    call = {"num_updates": 3, "tied": True, "num_logical_shards": NUM_SHARDS}
    (want,) = ranks.run(f"{JOBS}:updates", 1, {"layout": {}, **call})
    for got in ranks.run(f"{JOBS}:updates", 4, {"layout": {"pp": 2, "dp": 2}, **call}):
        for name in ("loss", "grad_norm", "absolute_terms"):
            assert got[name].tobytes() == want[name].tobytes(), name


def test_without_reproducible_mode_the_bits_differ_between_layouts(run: Run) -> None:
    one, two = (run(layout, num_logical_shards=None) for layout in ({}, {"dp": 2}))
    assert "grad_norm" in different(one, two)
    assert_close(two, one)


def test_without_reproducible_mode_a_token_cap_is_filled_for_the_present_layout(run: Run) -> None:
    one, many = (run(layout, num_logical_shards=None, max_tokens=32) for layout in ({}, {"pp": 2, "vpp": 2, "dp": 2}))
    assert_close(many, one)


def test_reproducible_mode_computes_the_same_numbers_as_the_plain_one(run: Run) -> None:
    assert_close(run({}), run({}, num_logical_shards=None))


def test_more_replicas_have_the_same_bits_at_the_same_tp(run: Run) -> None:
    assert different(run({"tp": 2, "dp": 2}, tied=True), run({"tp": 2}, tied=True)) == []


@pytest.mark.parametrize("recompute", effort.cases(["selective", "full"], always=["full"]))
def test_recomputed_activations_change_no_bit(run: Run, recompute: str) -> None:
    layout = {"pp": 2, "dp": 2}
    assert different(run(layout, tied=True, recompute=recompute), run(layout, tied=True)) == []


REFUSED = {
    "a number of shards that is not a power of two": (
        {"num_logical_shards": 3},
        "num_logical_shards=3 is not a power of two",
    ),
    "replicas that the shards do not divide by": (
        {"layout": {"dp": 2}, "num_logical_shards": 1},
        "dp=2 cannot be reproducible: it does not divide num_logical_shards=1; legal dp: 1",
    ),
    "experts": ({"experts": True}, "num_moe_experts=4 cannot be reproducible"),
    "dropout": ({"dropout": 0.1}, "hidden_dropout=0.1 cannot be reproducible"),
    "threads": ({"threads": 2}, "torch's threads=2 cannot be reproducible"),
}


@pytest.mark.parametrize(("arguments", "want"), REFUSED.values(), ids=REFUSED)
def test_settings_that_break_reproducibility_are_refused(
    ranks: RankServer, arguments: dict[str, Any], want: str
) -> None:
    call = {"layout": {}, "num_updates": 1, "num_logical_shards": NUM_SHARDS, **arguments}
    with pytest.raises(RuntimeError, match=want):
        ranks.run(f"{RUNS}:updates", call["layout"].get("dp", 1), call)


FIFTY = ({"dp": 2}, {"dp": 4}, {"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 2}, {"pp": 4, "dp": 2})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_updates_have_the_same_bits(run: Run) -> None:
    want = run({}, tied=True, num_updates=50, rate=1e-3)
    for layout in FIFTY:
        assert different(run(layout, tied=True, num_updates=50, rate=1e-3), want) == [], layout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"cp": 2}, {"tp": 2, "pp": 2, "cp": 2}], ids=["tp2", "cp2", "tp2 pp2 cp2"]
)
def test_fifty_updates_at_another_tp_or_cp_stay_within_a_ten_thousandth(run: Run, layout: dict[str, int]) -> None:
    want = run({}, tied=True, num_updates=50, rate=1e-3)
    got = run(layout, tied=True, num_updates=50, rate=1e-3)
    assert_close(got, want)
