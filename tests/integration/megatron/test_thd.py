"""Megatron's model computes the same without padding as with it: embeddings, rotary positions, labels, gradients.

The attention here takes one sequence at a time. Transformer Engine's attention runs in tests/gpu.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import RankServer

COMPARED = "tests.integration.megatron.thd_ranks:compared"


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_log_probabilities_and_gradients_are_those_of_the_padded_batch(
    ranks: RankServer, layout: dict[str, int]
) -> None:
    num_ranks = max(layout.values(), default=1)
    for found in ranks.run(COMPARED, num_ranks, {"layout": layout}):
        names = [name.removeprefix("padded/") for name in found if name.startswith("padded/")]
        assert any(name.startswith("grad/") for name in names)
        for name in names:
            want = found[f"padded/{name}"]
            tolerance = 2e-5 * max(1.0, np.abs(want).max())
            np.testing.assert_allclose(found[f"thd/{name}"], want, atol=tolerance, err_msg=name)
