"""The record of the last closed batch in the ledger of learning-rate progress. It tells a repeat from a new report.

The record keeps only the number of units of each update, so that it stays small whatever the units were.

Invariants:
- A repeated report changes nothing. [test_lr_progress: a_repeated_report_changes_nothing]
- A report that the batch never had, or had with another outcome, is refused and not taken for a repeat.
  [test_lr_progress: a_report_that_the_last_closed_batch_never_had]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from tidegate.lr.errors import NoOpenBatch, UpdateConflict


@dataclass(frozen=True, slots=True)
class ClosedBatch:
    id: int
    nominal: Fraction
    updates: Mapping[str, int] = field(default_factory=dict)
    """The number of units of each update, by the update's id. Empty: nothing of the batch was left to train on."""
    skips: frozenset[str] = frozenset()

    def check_update(self, update: str, num_units: int, *, is_skip: bool) -> None:
        """NoOpenBatch: the batch never had this update. UpdateConflict: it had it with another outcome."""
        if update not in self.updates:
            raise NoOpenBatch(
                f"batch {self.id} is closed, and none of its {len(self.updates)} updates is {update}: report an update "
                "before its batch closes"
            )
        if self.updates[update] != num_units or (update in self.skips) != is_skip:
            raise UpdateConflict(
                f"update {update} of batch {self.id}, which is closed, was reported with {self.updates[update]} units "
                f"and comes again with {num_units}, or with another outcome: give each update an id of its own"
            )

    def check_empty(self, nominal: Fraction) -> None:
        """UpdateConflict: the batch had updates, or owned another number of steps."""
        if self.updates or nominal != self.nominal:
            raise UpdateConflict(
                f"batch {self.id} was closed with {len(self.updates)} updates and {self.nominal} steps, and comes "
                f"again as an empty one of {nominal}: report a batch once, or again with the same numbers"
            )
