"""The errors of a learning-rate ledger, one class for each kind, so that a caller can distinguish them.

Invariant: a call that raises one of these errors has changed nothing. [test_lr_progress: bad_input_to_an_open_batch]
"""

from __future__ import annotations


class LrError(ValueError):
    """The ledger refuses a call and has changed nothing. The message gives the numbers and the remedy."""


class ScheduleRefused(LrError):
    """A schedule that contradicts itself: a warm-up that ends after the decay, rates out of order."""


class BudgetRefused(LrError):
    """A budget of less than one step."""


class NominalRefused(LrError):
    """A number of steps that is not exact and positive: zero, negative, a float, NaN, a bool."""


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
    """A unit that does not belong to the batch, or a value that is no unit."""


class DuplicateUnit(LrError):
    """A unit that an earlier update has consumed, or that is named twice."""


class UpdateConflict(LrError):
    """An update id that comes again with other units or another outcome."""


class TooManySkips(LrError):
    """More consecutive updates were skipped than the rules allow."""


class RanksDisagree(LrError):
    """Ranks hold different progress."""


class CheckpointRefused(LrError):
    """A saved ledger that is newer than this version, damaged, or of other rules."""


class BudgetMismatch(CheckpointRefused):
    """The config and the saved ledger have different schedules, and no setting says which one holds."""


class ForeignCheckpoint(CheckpointRefused):
    """Counters without a unit, and no setting says how to use them."""
