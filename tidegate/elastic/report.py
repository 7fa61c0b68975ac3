"""What a reshard did and what it cost, as one member saw it; the bytes are those of all members together.

Invariants: a report is made only of a committed reshard; `moved_bytes` counts each byte that went to a rank that did
not hold it, once a rank; the seconds are wall-clock on the reporting member, a part each, and a part that did not occur
is 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tidegate.types import Layout

PARTS = ("agreement", "groups", "build", "plan", "allocation", "transfer", "certificate", "copies", "vote", "switch")
"""In their order. `groups` and `build` are near 0 for a layout that was prepared before."""


@dataclass(frozen=True, slots=True)
class ReshardReport:
    source: Layout
    source_ranks: tuple[int, ...]
    target: Layout
    target_ranks: tuple[int, ...]
    num_updates: int
    """Committed before it, and in it."""
    moved_bytes: int
    minimum_bytes: int
    """What the target's ranks want and did not hold."""
    local_bytes: int
    """Copied within a rank."""
    certificate: str
    """Checksum of the logical state, the same before and after; empty where the level is off."""
    seconds: Mapping[str, float]
    """By part, see PARTS."""
    lost: tuple[int, ...] = ()
    """Members of the source that had died."""
    restored: Mapping[int, str] = field(default_factory=dict)
    """By member of the source whose state was not taken from itself as it was: what it was taken from."""
    redone_updates: int = 0
    """Committed on some member, and gone; they are trained again."""
    redone_samples: int = 0
    """Of those updates."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s}


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds of named parts."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
