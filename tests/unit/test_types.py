"""Tokens and layouts: tokens have one order, and no layout exists that Megatron cannot run."""

from __future__ import annotations

import pytest

from tidegate.types import Layout, Token


def test_tokens_are_ordered_by_term_first_and_then_by_counter() -> None:
    tokens = [Token(2, 1), Token(1, 9), Token(1, 10), Token(2, 0)]
    assert sorted(tokens) == [Token(1, 9), Token(1, 10), Token(2, 0), Token(2, 1)]


@pytest.mark.parametrize(
    ("axes", "named"),
    [({"tp": 0}, "tp=0"), ({"dp": -1}, "dp=-1"), ({"vpp": 2}, "vpp=2 with pp=1")],
    ids=["an axis of 0", "a negative axis", "several chunks of layers in one stage"],
)
def test_a_layout_that_megatron_cannot_run_is_refused(axes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Layout(**axes)
