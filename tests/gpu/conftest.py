"""The ranks of the tests on a CUDA device. Without one, all these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankServer, rank_server


@pytest.fixture(scope="session", autouse=True)
def cuda() -> Iterator[str]:
    """The device on which everything here runs."""
    with pytest.MonkeyPatch.context() as patch:
        # The server of the ranks asks whether there is CUDA before it forks: by NVML, for a context cannot be forked.
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield "cuda:0"


@pytest.fixture(scope="session")
def ranks(cuda: str) -> Iterator[RankServer]:
    with rank_server() as server:
        yield server
