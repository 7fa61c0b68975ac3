"""Skeletons of real Megatron models: their tensors, the release of their memory, their parameter groups."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import RankServer

JOBS = "tests.integration.elastic.skeleton_ranks:"

MESHES: list[dict[str, Any]] = [
    {"layout": {"tp": 2, "pp": 2}, "ranks": [2, 0, 3, 1], "model": {"tied": True}},
    {"layout": {"pp": 2, "vpp": 2, "dp": 2}, "ranks": [0, 1, 2, 3], "model": {"tied": True}},
    {"layout": {"dp": 3}, "ranks": [3, 1, 0], "model": {}},
    {"layout": {"dp": 2, "cp": 2}, "ranks": [0, 1, 2, 3], "model": {"bf16": True}},
    {"layout": {"tp": 2, "dp": 2, "ep": 2}, "ranks": [0, 1, 2, 3], "model": {"experts": True}},
    {"layout": {"pp": 2, "dp": 2, "ep": 2}, "ranks": [3, 2, 1, 0], "model": {"experts": True, "bf16": True}},
    {"layout": {"tp": 2}, "ranks": [1, 3], "model": {"frozen": True}},
]


@pytest.fixture
def tmpfs() -> Iterator[str]:
    """A folder of the host's shared memory, removed afterwards."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def test_a_rank_holds_exactly_what_the_planner_says_and_members_outside_the_mesh_stand_by(ranks: RankServer) -> None:
    found = ranks.run(JOBS + "held_tensors", 4, {"cases": MESHES})

    assert [of_rank["wrong"].tolist() for of_rank in found] == [[], [], [], []]
    assert [len(of_rank["counts"]) for of_rank in found] == [
        sum(rank in mesh["ranks"] for mesh in MESHES) for rank in range(4)
    ]
    assert all((of_rank["counts"] > 0).all() for of_rank in found)


@pytest.mark.parametrize(
    ("layout", "model_of", "shared"),
    [
        ({"dp": 2}, {"bf16": True, "frozen": True}, True),
        ({"pp": 2}, {"tied": True}, False),
        pytest.param({"dp": 2, "ep": 2}, {"experts": True}, True, marks=pytest.mark.long),
        pytest.param({"pp": 2, "vpp": 2, "dp": 2}, {"tied": True, "bf16": True}, True, marks=pytest.mark.long),
        pytest.param({"tp": 2, "cp": 2}, {}, False, marks=pytest.mark.long),
        pytest.param({"tp": 2, "dp": 2, "ep": 2}, {"experts": True, "bf16": True}, False, marks=pytest.mark.long),
        pytest.param({"tp": 2, "dp": 2}, {"frozen": True}, True, marks=pytest.mark.long),
    ],
)
def test_training_on_released_and_refilled_memory_equals_the_unbroken_run(
    ranks: RankServer, tmpfs: str, layout: dict[str, int], model_of: dict[str, Any], shared: bool
) -> None:
    num_ranks = int(np.prod([size for axis, size in layout.items() if axis in ("tp", "pp", "dp", "cp")]))
    arguments = {"layout": layout, "model_of": model_of, "folder": tmpfs if shared else None}

    for of_rank in ranks.run(JOBS + "released_and_filled", num_ranks, arguments):
        assert of_rank["same"].tolist() == [True, True, True]
        assert of_rank["losses"][2:].tolist() == of_rank["again"][0].tolist() == of_rank["again"][1].tolist()
        # Updates 0 and 2 see the same tokens.
        assert of_rank["losses"][2] < of_rank["losses"][0]
        assert of_rank["steps"].tolist() == [4.0]
        assert of_rank["gradient_sizes_fit"]
        released, materialised = of_rank["bytes"]
        assert released == 0
        # A file's memory is a number of whole pages.
        assert of_rank["expected_bytes"] <= materialised < of_rank["expected_bytes"] + 4096
    assert not list(Path(tmpfs).iterdir())


def test_optimizers_that_cannot_change_their_layout_are_refused_by_name(ranks: RankServer) -> None:
    (found,) = ranks.run(JOBS + "refusals", 1)

    assert str(found["adam"]) == ""
    assert "LayerWiseDistributedOptimizer cannot change its layout: it distributes whole" in str(found["layer-wise"])
    assert "HybridDeviceOptimizer cannot change its layout: a part" in str(found["offloaded"])
    assert "optimizer sgd cannot change its layout" in str(found["sgd"])
    assert "use_distributed_optimizer=False cannot change its layout" in str(found["plain"])
    assert "parameters of [4] bytes an element, and with bf16=True all must have 2" in str(found["bf16 optimizer"])
    assert "parameters of [2] bytes an element, and with bf16=False all must have 4" in str(found["fp32 optimizer"])


@pytest.mark.parametrize(
    ("experts", "layout", "other_layout", "want_groups_of"),
    [
        (False, {"pp": 2}, {"dp": 2}, [0, 1, 2]),
        # With expert parallelism, experts have groups of their own after the dense ones; without, they share them.
        (True, {"dp": 2}, {"dp": 2, "ep": 2}, [0, 1, 2, 0]),
        (True, {"dp": 2, "ep": 2}, {"pp": 2}, [0, 1, 2]),
    ],
)
def test_another_layouts_optimizer_continues_with_the_groups_values_and_the_schedule(
    ranks: RankServer, experts: bool, layout: dict[str, int], other_layout: dict[str, int], want_groups_of: list[int]
) -> None:
    arguments = {"experts": experts, "layout": layout, "other_layout": other_layout}

    for of_rank in ranks.run(JOBS + "scheduled", 2, arguments):
        assert of_rank["again"].tolist() == of_rank["values"][:, want_groups_of].tolist()
        assert len({tuple(group) for group in of_rank["values"][0].tolist()}) >= 3
        assert of_rank["again"][0][0][2] == 0.5
        assert str(of_rank["betas"]) == "(0.9, 0.999)"
        assert of_rank["experts"].tolist() == [False] * 3 + [True] * (len(want_groups_of) - 3)
        assert "none of 1 parameter groups was made as" in str(of_rank["strange"])
        assert of_rank["after_refusal"][0] == 0.5


def test_random_numbers_are_a_function_of_seed_update_and_coordinates(ranks: RankServer) -> None:
    layouts = [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}]

    (found,) = ranks.run(JOBS + "random_numbers", 1, {"layouts": layouts})

    there, other, back = found["0"], found["1"], found["2"]
    assert np.array_equal(there, back)
    assert not np.array_equal(there[0], found["next"][0])
    default, of_tp, of_experts, of_all = range(4)
    # Ranks 0 and 1 are the tp ranks of one replica, 2 and 3 those of the other.
    assert np.array_equal(there[0, default], there[1, default])
    assert np.array_equal(there[0, -1], there[1, -1])
    assert not np.array_equal(there[0, default], there[2, default])
    for stream in (of_tp, of_experts):
        assert len({there[rank, stream].tobytes() for rank in range(4)}) == 4
    assert len({there[rank, of_all].tobytes() for rank in range(4)}) == 1
    # After a reshard within the update each stream has other numbers, shared as before.
    carried = found["carried"]
    assert not any((carried[0, stream] == there[0, stream]).any() for stream in range(5))
    assert np.array_equal(carried[0, default], carried[1, default])
    assert len({carried[rank, of_all].tobytes() for rank in range(4)}) == 1
    # In the other layout every rank is another replica or stage.
    assert len({other[rank, default].tobytes() for rank in range(4)}) == 4
