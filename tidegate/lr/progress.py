"""The ledger of learning-rate progress: the position in the schedule as an exact function of consumed data.

A unit is one sample in one epoch. A batch is one call of the trainer. It has units and owns steps of the budget.
In mode `nominal` an update moves progress by

    share = nominal * n / N

    share    the steps of the update
    nominal  the steps that the batch owns
    n        the units that the update consumes
    N        the units of the batch

so that the rate at any point of the data does not depend on the token cap, the data-parallel size or the grouping into
updates. In mode `optimizer_updates` each successful update is one step. An update uses the rate of the progress before
it.

A ledger is a value: each method returns the next ledger. Gradients that are dropped are not reported to it: their units
stay pending, and may be assigned to other ranks.

Invariants:
- Progress and all counters are ints and Fractions, never floats. [test_lr_progress: no_float_is_in_the_ledger]
- Each unit is consumed once. [test_lr_progress: bad_input_to_an_open_batch]
- A repeated report counts once, in whatever order reports come. [test_lr_progress: repeated_and_reordered_reports]
  A repeat for the last closed batch is compared with that batch. The ids of older batches are not kept: any report
  for them passes as a repeat.
- In mode `nominal`: steps of all batches = progress made + `skipped` + `shortfall` + steps of pending units.
  [test_lr_progress: every_step_is_accounted_for]
- A refused call changes nothing. [test_lr_progress: a_batch_that_cannot_open]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction

from tidegate.lr.closed import ClosedBatch
from tidegate.lr.errors import (
    BatchOpen,
    BatchRefused,
    DuplicateUnit,
    NoOpenBatch,
    OverConsumption,
    RanksDisagree,
    TooManySkips,
    UnitsLeft,
    UnknownUnit,
    UpdateConflict,
)
from tidegate.lr.schedule import LrSchedule, Steps, exact_steps
from tidegate.lr.units import Units


class LrMode(StrEnum):
    """The meaning of one step of progress."""

    NOMINAL = "nominal"
    OPTIMIZER_UPDATES = "optimizer_updates"


class OnSkip(StrEnum):
    """The effect on progress, in mode `nominal`, of an update with a non-finite gradient."""

    ADVANCE = "advance"
    HOLD = "hold"


class EmptyBatch(StrEnum):
    """The effect on progress, in mode `nominal`, of a batch without any update."""

    HOLD = "hold"
    ADVANCE = "advance"


@dataclass(frozen=True, slots=True)
class LrRules:
    """The rules of counting progress. `mode` and `logical_minibatch` are the same for a whole lineage."""

    logical_minibatch: int
    """The units of one nominal update, over all ranks. It does not depend on the number of ranks."""
    mode: LrMode = LrMode.NOMINAL
    on_skip: OnSkip = OnSkip.ADVANCE
    empty_batch: EmptyBatch = EmptyBatch.HOLD
    max_consecutive_skips: int = 3

    def __post_init__(self) -> None:
        _whole(self.logical_minibatch, "logical_minibatch", least=1)
        _whole(self.max_consecutive_skips, "max_consecutive_skips", least=0)

    def nominal_of(self, num_units: int) -> Fraction:
        """The steps that a batch owns by its size."""
        return Fraction(_whole(num_units, "num_units", least=1), self.logical_minibatch)


@dataclass(frozen=True, slots=True)
class OpenBatch:
    id: int
    num_units: int
    nominal: Fraction
    """The steps that the batch owns."""
    updates: Mapping[str, Units] = field(default_factory=dict)
    """The units that each update has consumed, by the update's id."""
    skips: frozenset[str] = frozenset()
    """The ids of the updates that were skipped."""
    consumed: Units = field(default_factory=Units)

    @property
    def pending(self) -> Units:
        return Units.of(range(self.num_units)) - self.consumed

    def share(self, units: Units) -> Fraction:
        """The steps of these units: `nominal * n / N`."""
        return self.nominal * units.count / self.num_units


@dataclass(frozen=True, slots=True)
class LrLedger:
    """The ledger of this module. A new lineage begins with `LrLedger(schedule, rules)`."""

    schedule: LrSchedule
    rules: LrRules
    origin: Fraction = Fraction(0)
    """The progress at which the ledger began, from a checkpoint without a ledger."""
    progress: Fraction = Fraction(0)
    committed: Fraction = Fraction(0)
    """The progress after the last applied update."""
    open_batch: OpenBatch | None = None
    next_batch: int = 0
    """All batches with a smaller id are closed."""
    last_batch: ClosedBatch | None = None
    """The last closed batch. None: nothing is known of it, as in a checkpoint of an older version."""
    nominal: Fraction = Fraction(0)
    """The steps of all batches, the open one included."""
    num_units: int = 0
    num_updates: int = 0
    """The number of applied updates."""
    num_skips: int = 0
    num_consecutive_skips: int = 0
    skipped: Fraction = Fraction(0)
    """The steps of units whose update was skipped without any progress."""
    shortfall: Fraction = Fraction(0)
    """The steps of batches without any update and without any progress."""

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.schedule.rate(self.num_steps)

    @property
    def num_steps(self) -> Steps:
        """The progress for Megatron's scheduler: an int where it is whole."""
        return self.progress.numerator if self.progress.denominator == 1 else self.progress

    @property
    def overshoot(self) -> Fraction:
        """The steps beyond the budget."""
        return max(Fraction(0), self.progress - self.schedule.budget)

    @property
    def mark(self) -> str:
        """A text that must be the same on every rank. It is empty before the first update."""
        return f"{self.committed} steps after {self.num_updates} updates" if self.num_updates else ""

    def opened(self, batch: int, num_units: int, *, nominal: Steps | None = None, dp: int = 1) -> LrLedger:
        """Begin a batch. `nominal` sets its steps; None: its size does. `dp` is only checked."""
        self._check_follows(batch)
        if _whole(num_units, "num_units", least=1) < _whole(dp, "dp", least=1):
            raise BatchRefused(f"batch {batch} has {num_units} units for dp={dp}: use fewer replicas or larger batches")
        steps = self.rules.nominal_of(num_units) if nominal is None else exact_steps(nominal)
        return replace(self, open_batch=OpenBatch(batch, num_units, steps), nominal=self.nominal + steps)

    def committed_update(self, batch: int, update: str, units: Units | Iterable[int]) -> LrLedger:
        """The optimizer has applied this update. `units` are those of all ranks."""
        now = self._taking(batch, update, Units.of(units), is_skip=False)
        if now is None:
            return self
        before = self._open(batch)
        is_nominal = self.rules.mode is LrMode.NOMINAL
        progress = self.progress + (before.share(now.updates[update]) if is_nominal else 1)
        return replace(
            self,
            open_batch=now,
            progress=progress,
            committed=progress,
            num_units=self.num_units + now.updates[update].count,
            num_updates=self.num_updates + 1,
            num_consecutive_skips=0,
        )

    def skipped_update(self, batch: int, update: str, units: Units | Iterable[int]) -> LrLedger:
        """The gradient of this update was not finite, and its units will not be trained on again.

        TooManySkips: the rules allow no further consecutive skip."""
        now = self._taking(batch, update, Units.of(units), is_skip=True)
        if now is None:
            return self
        if self.num_consecutive_skips >= self.rules.max_consecutive_skips:
            raise TooManySkips(
                f"{self.num_consecutive_skips + 1} updates in a row were skipped, the last {update} of batch {batch}; "
                f"at most {self.rules.max_consecutive_skips} are allowed: lower the rate or go back to a checkpoint"
            )
        share = now.share(now.updates[update])
        moves = self.rules.mode is LrMode.NOMINAL and self.rules.on_skip is OnSkip.ADVANCE
        return replace(
            self,
            open_batch=now,
            progress=self.progress + (share if moves else 0),
            num_units=self.num_units + now.updates[update].count,
            num_skips=self.num_skips + 1,
            num_consecutive_skips=self.num_consecutive_skips + 1,
            skipped=self.skipped + (0 if moves else share),
        )

    def closed(self, batch: int) -> LrLedger:
        """End a batch. UnitsLeft: some of its units are not consumed yet."""
        if self._is_past(batch):
            return self
        if pending := self._open(batch).pending:
            raise UnitsLeft(
                f"batch {batch} cannot close: {pending.count} of {self._open(batch).num_units} units are pending, the "
                f"first {pending.runs[0][0]}; train on them or skip their update"
            )
        was = self._open(batch)
        counts = {update: units.count for update, units in was.updates.items()}
        last = ClosedBatch(batch, was.nominal, counts, was.skips)
        return replace(self, open_batch=None, next_batch=batch + 1, last_batch=last)

    def emptied(self, batch: int, nominal: Steps) -> LrLedger:
        """Begin and end a batch that owns `nominal` steps but has nothing left to train on."""
        steps = exact_steps(nominal)
        if self._is_past(batch):
            if last := self._last(batch):
                last.check_empty(steps)
            return self
        self._check_follows(batch)
        moves = self.rules.mode is LrMode.NOMINAL and self.rules.empty_batch is EmptyBatch.ADVANCE
        return replace(
            self,
            next_batch=batch + 1,
            last_batch=ClosedBatch(batch, steps),
            nominal=self.nominal + steps,
            progress=self.progress + (steps if moves else 0),
            shortfall=self.shortfall + (0 if moves else steps),
        )

    def next_units(self, count: int) -> Units:
        """The lowest `count` pending units of the open batch. NoOpenBatch; OverConsumption: fewer are pending."""
        if self.open_batch is None:
            raise NoOpenBatch("no batch is open: open one before its updates")
        return self.open_batch.pending.first(_whole(count, "count", least=1))

    def _is_past(self, batch: int) -> bool:
        return _whole(batch, "batch", least=0) < self.next_batch

    def _last(self, batch: int) -> ClosedBatch | None:
        return self.last_batch if self.last_batch is not None and self.last_batch.id == batch else None

    def _check_follows(self, batch: int) -> None:
        _whole(batch, "batch", least=0)
        if self.open_batch is not None:
            raise BatchOpen(f"batch {batch} cannot begin: batch {self.open_batch.id} is open; close it first")
        if batch != self.next_batch:
            raise BatchRefused(f"batch {batch} cannot begin: the next batch is {self.next_batch}")

    def _open(self, batch: int) -> OpenBatch:
        if self.open_batch is None or self.open_batch.id != batch:
            is_open = f"{self.open_batch.id} is" if self.open_batch else "none is"
            raise NoOpenBatch(f"batch {batch} is not open ({is_open}): open it before its updates")
        return self.open_batch

    def _taking(self, batch: int, update: str, units: Units, *, is_skip: bool) -> OpenBatch | None:
        """The open batch with the update. None: the report is a repeat."""
        if self._is_past(batch):
            if last := self._last(batch):
                last.check_update(update, units.count, is_skip=is_skip)
            return None
        now = self._open(batch)
        if update in now.updates:
            if now.updates[update] != units or (update in now.skips) != is_skip:
                raise UpdateConflict(
                    f"update {update} of batch {batch} was reported with {now.updates[update].count} units and comes "
                    f"again with {units.count}, or with another outcome: give each update an id of its own"
                )
            return None
        _check_units(now, units, f"update {update} of batch {batch}")
        skips = now.skips | {update} if is_skip else now.skips
        return replace(now, updates={**now.updates, update: units}, skips=skips, consumed=now.consumed | units)


def agreed_mark(marks: Mapping[int, str]) -> str:
    """The common mark of all ranks. RanksDisagree, which names the ranks: the marks differ."""
    holders: dict[str, list[int]] = {}
    for rank, mark in sorted(marks.items()):
        holders.setdefault(mark, []).append(rank)
    if len(holders) != 1:
        groups = "; ".join(f"ranks {ranks}: {mark or 'no update'}" for mark, ranks in holders.items())
        raise RanksDisagree(f"ranks hold different progress ({groups}): restart them all from one checkpoint")
    return next(iter(holders))


def projected_overshoot(schedule: LrSchedule, num_updates: int) -> Fraction:
    """The steps beyond the budget after `num_updates` updates of one step each."""
    return max(Fraction(0), num_updates - Fraction(schedule.budget))


def _check_units(batch: OpenBatch, units: Units, what: str) -> None:
    if not units:
        raise UnknownUnit(f"{what} names no unit: an update consumes at least one, and padding does not count")
    if units.count > batch.num_units - batch.consumed.count:
        raise OverConsumption(
            f"{what} consumes {units.count} units, {batch.num_units - batch.consumed.count} of {batch.num_units} are "
            "pending: do not count padded and duplicated samples"
        )
    if strangers := units - Units.of(range(batch.num_units)):
        raise UnknownUnit(f"{what} names unit {strangers.runs[0][0]}; the batch has 0-{batch.num_units - 1}")
    if again := units & batch.consumed:
        raise DuplicateUnit(f"{what} names unit {again.runs[0][0]}, which an earlier update has consumed")


def _whole(value: int, name: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BatchRefused(f"{name}={value!r} must be an int of {least} or more")
    return value
