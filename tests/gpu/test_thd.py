"""Transformer Engine's attention keeps sequences apart as a padded batch does. Needs CUDA; has not run yet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.ranks import RankServer, rank_server

pytestmark = pytest.mark.gpu


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankServer]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("transformer_engine")
    # The server asks whether there is CUDA before it forks: by NVML, for a context cannot be forked.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with rank_server() as server:
        yield server


def test_log_probabilities_and_gradients_without_padding_are_those_of_the_padded_batch_in_bf16(
    ranks: RankServer,
) -> None:
    arguments = {"layout": {}, "device": "cuda:0", "precision": "bf16"}
    (found,) = ranks.run("tests.integration.megatron.thd_ranks:compared", 1, arguments, timeout_s=100.0)
    names = [name.removeprefix("padded/") for name in found if name.startswith("padded/")]
    for name in names:
        want = found[f"padded/{name}"]
        tolerance = 0.05 * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(found[f"thd/{name}"], want, atol=tolerance, err_msg=name)
