"""The oracle itself: dist_checkpointing loads in one layout the state that was saved in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import effort
from tests.integration.elastic import dist_checkpoint_ranks
from tests.integration.elastic.dist_checkpoint import logical_state
from tests.ranks import RankServer
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.types import Layout

THROUGH = "tests.integration.elastic.dist_checkpoint_ranks:through_a_checkpoint"
TP2_DP2 = ({"tp": 2, "pp": 1, "dp": 2}, [0, 1, 2, 3])
PP2_VPP2 = ({"tp": 1, "pp": 2, "dp": 1, "vpp": 2}, [3, 1])


@pytest.mark.parametrize("dtype", effort.cases(["float32", "bfloat16"], always=["bfloat16"]))
def test_the_oracle_loads_in_one_layout_the_state_that_was_saved_in_another(
    ranks: RankServer, tmp_path: Path, dtype: str
) -> None:
    arguments = {"source": TP2_DP2, "target": PP2_VPP2, "dtype": dtype, "folder": str(tmp_path), "num_steps": 7}

    found = ranks.run(THROUGH, 4, arguments)

    want, loaded = (
        _logical(found, label, layout, dtype) for label, layout in (("source:", TP2_DP2), ("target:", PP2_VPP2))
    )
    assert loaded.keys() == want.keys()
    for key, tensor in want.items():
        np.testing.assert_array_equal(loaded[key], tensor, err_msg=str(key))
    assert {float(tensor.item()) for (_, kind), tensor in loaded.items() if kind is StateKind.STEP} == {7.0}


def _logical(found: Any, label: str, layout: Any, dtype: str) -> Any:
    provider = dist_checkpoint_ranks.provider(dtype)
    sizes, members = layout
    of_ranks = [
        {key.removeprefix(label): array for key, array in of_rank.items() if key.startswith(label)} for of_rank in found
    ]
    return logical_state(of_ranks, provider.parameters(), provider.mesh(Layout(**sizes), tuple(members)))
