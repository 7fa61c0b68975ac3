"""Checkpoints are ordered by numbers, incarnation first, whatever their names' lengths."""

from __future__ import annotations

from tidegate.checkpoint_names import checkpoint_name, place_of


def test_a_later_incarnation_is_newer_beyond_three_digits_too() -> None:
    want = [(1, 7), (2, 3), (999, 1), (1000, 0), (1000, 1_000_000)]
    names = sorted((checkpoint_name(*place) for place in reversed(want)), key=lambda name: place_of(name) or ())
    assert [place_of(name) for name in names] == want


def test_other_folders_are_no_checkpoints() -> None:
    assert [place_of(name) for name in (".partial", "inc001", "inc001-it000002.old")] == [None, None, None]
