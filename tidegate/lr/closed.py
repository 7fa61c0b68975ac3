"""What the ledger of learning-rate progress keeps of the batch that was closed last, and what may be told of it again.

Invariants: what was told again changes nothing; what was never told, or told otherwise, is refused rather than taken
for a repeat. Only how many units an update took is kept, so that it stays small whatever the units were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from tidegate.lr.errors import NoOpenBatch, UpdateConflict


@dataclass(frozen=True, slots=True)
class ClosedBatch:
    """Its updates by their ids; none where nothing of the batch was left to train on."""

    id: int
    nominal: Fraction
    updates: Mapping[str, int] = field(default_factory=dict)
    """How many units each took."""
    skips: frozenset[str] = frozenset()

    def check_update(self, update: str, num_units: int, *, is_skip: bool) -> None:
        """NoOpenBatch for one that the batch never had, UpdateConflict for another outcome."""
        if update not in self.updates:
            raise NoOpenBatch(
                f"batch {self.id} is closed, and none of its {len(self.updates)} updates is {update}: tell an update "
                "before its batch closes"
            )
        if self.updates[update] != num_units or (update in self.skips) != is_skip:
            raise UpdateConflict(
                f"update {update} of batch {self.id}, which is closed, was told with {self.updates[update]} units and "
                f"comes again with {num_units}, or with another outcome: give each update an id of its own"
            )

    def check_empty(self, nominal: Fraction) -> None:
        """UpdateConflict where it was trained, or owned other steps."""
        if self.updates or nominal != self.nominal:
            raise UpdateConflict(
                f"batch {self.id} was closed with {len(self.updates)} updates and {self.nominal} steps, and comes "
                f"again as an empty one of {nominal}: tell each batch once, or as it was"
            )
