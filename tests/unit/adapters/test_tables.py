"""What the tables have, as this release and earlier ones write it."""

from __future__ import annotations

import pytest

from tidegate.adapters.tables import read_drain
from tidegate.ownership.records import StoreDamaged
from tidegate.types import Drain


def test_a_drain_of_an_earlier_release_takes_the_jobs_away_and_another_text_is_damaged() -> None:
    assert read_drain(b"1", "n0") is Drain.LEAVE
    for drain in Drain:
        assert read_drain(drain.encode(), "n0") is drain
    with pytest.raises(StoreDamaged, match="b'2' as the drain of node n0"):
        read_drain(b"2", "n0")
