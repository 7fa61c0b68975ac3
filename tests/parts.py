"""A part of a long suite: `--part 2/4` keeps every fourth test, from the second on.

Neighbours take about as long as each other (one test over many parameters), so dealing the tests out in turn makes
parts of about the same length.

Invariant: the parts of one number hold every test exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

Test = TypeVar("Test")


def dealt(tests: Sequence[Test], part: str) -> list[Test]:
    """The tests of a part, in their order. ValueError for what is no part."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"part {part!r}: give K/N, the K-th of N parts with K at most N, such as 2/4")
    return list(tests[int(found[1]) - 1 :: int(found[2])])
