"""One server of rank processes for all tests below this folder that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankServer, rank_server


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    with rank_server() as server:
        yield server
