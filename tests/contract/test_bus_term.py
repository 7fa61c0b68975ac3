"""On every bus the fencing term only grows, by compare-and-set."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.bus_bench import Bench, bench, nats_url, open_bench
from tidegate.ports.bus import StaleTerm

__all__ = ["bench", "nats_url", "open_bench"]


async def test_the_term_grows_by_compare_and_set_only(bench: Bench) -> None:
    register = bench.bus.term
    term, revision = await register.read()
    after = await register.advance(expected_revision=revision, term=term + 3)
    assert await register.read() == (term + 3, after)
    with pytest.raises(StaleTerm, match=f"since revision {revision} was read"):
        await register.advance(expected_revision=revision, term=term + 9)
    with pytest.raises(ValueError, match="only grows"):
        await register.advance(expected_revision=after, term=term + 3)
    assert await register.read() == (term + 3, after)


async def test_of_writers_that_race_for_the_next_term_one_wins(bench: Bench) -> None:
    register = bench.bus.term
    term, revision = await register.read()
    outcomes = await asyncio.gather(
        *(register.advance(expected_revision=revision, term=term + 1 + by) for by in range(5)), return_exceptions=True
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, StaleTerm) for outcome in outcomes) == 4
