"""What a reshard did and its cost, as one member saw it. The bytes are those of all members together.

Invariants:
- A report is made only for a committed reshard. [test_refusals: a_failure_of_one_member_before_the_decision]
- `moved_bytes` counts each byte that went to a rank that did not hold it, once per rank.
  [test_certificate: a_plan_is_certified]
- The seconds are wall-clock time on the reporting member, per part. A part that did not occur is 0.
  [test_report: a_part_that_did_not_occur_is_zero]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tidegate.types import Layout

PARTS = ("agreement", "groups", "build", "plan", "allocation", "transfer", "certificate", "copies", "vote", "switch")
"""The parts of a reshard in their order. `groups` and `build` are near 0 for a layout that was prepared before."""


@dataclass(frozen=True, slots=True)
class ReshardReport:
    source: Layout
    source_ranks: tuple[int, ...]
    target: Layout
    target_ranks: tuple[int, ...]
    num_updates: int
    """The updates that were committed before the reshard and are in the state."""
    moved_bytes: int
    minimum_bytes: int
    """The bytes that the target's ranks need and did not hold."""
    local_bytes: int
    """The bytes that were copied within a rank."""
    certificate: str
    """A checksum of the logical state, the same before and after. Empty when the level is off, or the proof is late."""
    seconds: Mapping[str, float]
    """The seconds of each of PARTS."""
    was_built: bool = False
    """Whether the target's groups and tensors were there before: from an earlier switch, or built ahead."""
    num_portions: int = 0
    """The portions of the open minibatch whose gradients were carried. They are in the bytes and the certificate."""
    lost: tuple[int, ...] = ()
    """The members of the source that had died."""
    restored: Mapping[int, str] = field(default_factory=dict)
    """By member of the source whose own tensors were not used: the place from which its state was taken."""
    redone_updates: int = 0
    """The updates that some member had committed and that are lost. They are trained again."""
    redone_samples: int = 0
    """The samples of those updates."""

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
