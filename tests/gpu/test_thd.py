"""Transformer Engine's attention keeps sequences apart as a padded batch does. Needs CUDA; has not run yet."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import RankServer

pytestmark = pytest.mark.gpu


def test_log_probabilities_and_gradients_without_padding_are_those_of_the_padded_batch_in_bf16(
    ranks: RankServer, cuda: str
) -> None:
    pytest.importorskip("transformer_engine")
    arguments = {"layout": {}, "device": cuda, "precision": "bf16"}
    (found,) = ranks.run("tests.integration.megatron.thd_ranks:compared", 1, arguments, timeout_s=100.0)
    names = [name.removeprefix("padded/") for name in found if name.startswith("padded/")]
    for name in names:
        want = found[f"padded/{name}"]
        tolerance = 0.05 * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(found[f"thd/{name}"], want, atol=tolerance, err_msg=name)
