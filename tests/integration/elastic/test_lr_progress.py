"""Learning-rate progress is saved with its state, and continues from it in any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ranks import RankServer

RANKS = "tests.integration.elastic.lr_progress_ranks:"


@pytest.mark.parametrize("layout", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.long)], ids=str)
def test_a_restore_at_any_update_in_another_layout_continues_like_the_uninterrupted_run(
    ranks: RankServer, layout: dict[str, int], tmp_path: Path
) -> None:
    want, _ = ranks.run(RANKS + "uninterrupted", 2, {"folder": str(tmp_path)})
    assert len(set(want["rates"].tolist())) == len(want["rates"])
    for of_rank in ranks.run(RANKS + "restored", 2, {"folder": str(tmp_path), "layout": layout}):
        for saved, (losses, rates) in enumerate(zip(of_rank["losses"], of_rank["rates"], strict=True)):
            np.testing.assert_array_equal(rates[saved + 1 :], want["rates"][saved + 1 :])
            np.testing.assert_allclose(losses[saved + 1 :], want["losses"][saved + 1 :], rtol=1e-5)
        assert of_rank["ledgers"].tolist() == [str(want["ledger"])] * len(of_rank["ledgers"])
