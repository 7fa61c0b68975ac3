"""The seconds of a reshard, part by part."""

from __future__ import annotations

from tidegate.elastic.report import PARTS, Stopwatch


def test_a_part_that_did_not_occur_is_zero() -> None:
    watch = Stopwatch()
    with watch.part("plan"):
        sum(range(1000))

    assert tuple(watch.seconds) == PARTS
    assert watch.seconds["plan"] > 0
    assert {part for part, seconds in watch.seconds.items() if seconds == 0} == {*PARTS} - {"plan"}
