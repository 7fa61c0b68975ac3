"""A reshard gives every rank the same bits as Megatron's checkpoint, saved in one layout and loaded in the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankServer

RANKS = "tests.integration.elastic.against_dist_checkpointing_ranks:"
Place = dict[str, Any]

SWITCHES: dict[str, tuple[Place, Place, int]] = {
    "tensors to chunked stages": (
        {"layout": {"tp": 2, "dp": 2}},
        {"layout": {"pp": 2, "vpp": 2, "dp": 2}, "ranks": [3, 1, 0, 2]},
        4,
    ),
    "replicas to tensors and stages": ({"layout": {"dp": 4}}, {"layout": {"tp": 2, "pp": 2}, "ranks": [2, 0, 3, 1]}, 4),
    "stages to contexts on half the ranks": ({"layout": {"pp": 4}}, {"layout": {"cp": 2}, "ranks": [3, 1]}, 4),
    "half the ranks to tensors": ({"layout": {"dp": 2}, "ranks": [0, 3]}, {"layout": {"tp": 4}}, 4),
}
EXPERT_SWITCHES: dict[str, tuple[Place, Place, int]] = {
    "shared experts to cut ones": ({"layout": {"dp": 4, "ep": 2}}, {"layout": {"tp": 2, "dp": 2, "ep": 2}}, 4),
    "shared experts to chunked stages": (
        {"layout": {"cp": 2, "dp": 4, "ep": 4}},
        {"layout": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "dp": 2}, "ranks": [4, 5, 6, 7, 0, 1, 2, 3]},
        8,
    ),
}
"""All have expert parallelism on both sides.

Without it Megatron has one optimizer for experts and all else, and its checkpoint of that cannot be loaded into two.
"""
EVERYDAY = ("tensors to chunked stages", "bf16")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == EVERYDAY else pytest.mark.long)
        for name in (*SWITCHES, *EXPERT_SWITCHES)
        for dtype in ("fp32", "bf16")
    ],
)
def test_a_reshard_gives_every_rank_the_same_bits_as_a_checkpoint(
    ranks: RankServer, tmp_path: Path, name: str, dtype: str
) -> None:
    source, target, num_ranks = (SWITCHES | EXPERT_SWITCHES)[name]
    model = {"experts": name in EXPERT_SWITCHES, "bf16": dtype == "bf16"}
    arguments = {"source": source, "target": target, "folder": str(tmp_path)} | model

    found = ranks.run(RANKS + "resharded_and_loaded", num_ranks, arguments, timeout_s=120.0)

    members = target.get("ranks", range(num_ranks))
    for rank, of_rank in enumerate(found):
        assert of_rank["differing"].tolist() == []
        assert (of_rank["num_tensors"] > 0) == (rank in members)
        assert of_rank["steps"].tolist() == ([2.0] if rank in members else [])
