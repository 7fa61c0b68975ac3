"""On every bus the fencing term only grows, by compare-and-set."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.contract.bus_bench import Bench, bench, nats_url, open_bench
from tidegate.adapters import subjects
from tidegate.ports.bus import StaleTerm

__all__ = ["bench", "nats_url", "open_bench"]


async def test_the_term_grows_by_compare_and_set_only(bench: Bench) -> None:
    register = bench.bus.term
    term, revision = await register.read()
    assert term is not None
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
    assert term is not None
    outcomes = await asyncio.gather(
        *(register.advance(expected_revision=revision, term=term + 1 + by) for by in range(5)), return_exceptions=True
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, StaleTerm) for outcome in outcomes) == 4


GARBAGE = (
    b"",
    b"garbage",
    b"-5",
    b"+5",
    b" 5",
    b"5\n",
    b"007",
    b"1_0",
    b"\xff",
    "\u0665".encode(),
    b"9" * 30,
    b"1000000000",
)


@pytest.mark.parametrize("payload", GARBAGE, ids=repr)
async def test_what_a_stranger_writes_in_the_terms_place_is_no_term_and_is_replaced(
    bench: Bench, payload: bytes
) -> None:
    register = bench.bus.term
    term, revision = await register.read()
    assert term is not None
    await bench.publish_raw(subjects.TERM_SUBJECT, payload)
    with pytest.raises(StaleTerm, match=f"since revision {revision} was read"):
        await register.advance(expected_revision=revision, term=term + 1)
    found, revision = await register.read()
    assert found is None
    with capture_logs() as lines:
        after = await register.advance(expected_revision=revision, term=term + 1)
    assert await register.read() == (term + 1, after)
    want = ("warning", "the term register held no term", term + 1)
    assert [(line["log_level"], line["event"], line["replaced_by"]) for line in lines] == [want]


async def test_a_number_that_a_stranger_writes_in_the_terms_place_leaves_room_for_terms_above_it(bench: Bench) -> None:
    register = bench.bus.term
    await bench.publish_raw(subjects.TERM_SUBJECT, b"999999999")
    term, revision = await register.read()
    assert term == 999_999_999
    await register.advance(expected_revision=revision, term=term + 1)
    unread, revision = await register.read()
    assert unread is None, "it has ten digits"
    await register.advance(expected_revision=revision, term=term + 2)
    await bench.publish_raw(subjects.TERM_SUBJECT, b"0")
