"""What a learning-rate ledger refuses, each kind by a name of its own, so that a caller can tell them apart.

Invariant: whoever raises one of these has changed nothing.
"""

from __future__ import annotations


class LrError(ValueError):
    """Refused, with nothing changed; the message gives the numbers and what to do."""


class ScheduleRefused(LrError):
    """A schedule that contradicts itself: a warm-up that ends after the decay, rates out of order."""


class BudgetRefused(LrError):
    """A budget of less than one step."""


class NominalRefused(LrError):
    """A number of steps that is no exact positive number: zero, negative, a float, NaN, a bool."""


class BatchRefused(LrError):
    """A batch that cannot open: without units, smaller than the data-parallel size, out of order."""


class BatchOpen(LrError):
    """Another batch is open."""


class NoOpenBatch(LrError):
    """An update of a batch that is not open."""


class UnitsLeft(LrError):
    """A batch cannot close while units of it are pending."""


class OverConsumption(LrError):
    """More units than are pending."""


class UnknownUnit(LrError):
    """A unit that is none of the batch's, or no unit at all."""


class DuplicateUnit(LrError):
    """A unit that was consumed before, or is named twice."""


class UpdateConflict(LrError):
    """An update id comes again with other units or another outcome."""


class TooManySkips(LrError):
    """More consecutive updates were skipped than the rules allow."""


class RanksDisagree(LrError):
    """Ranks hold different progress."""


class CheckpointRefused(LrError):
    """A saved ledger that is newer than this version, damaged, or of other rules."""


class BudgetMismatch(CheckpointRefused):
    """The config and the saved ledger have different schedules, and nobody said which is meant."""


class ForeignCheckpoint(CheckpointRefused):
    """Counters that do not say what they count, and nobody said what to make of them."""
