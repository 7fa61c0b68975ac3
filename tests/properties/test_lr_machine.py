"""A life of a training run as its ledger sees it: batches, updates, skips, resizes within an accumulation, saves,
crashes, restores and acknowledgements that come again.

The oracle is a list of the ids of consumed units with what each is worth. It shares no code with the ledger.
"""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.lr.checkpoint import decoded, encoded
from tidegate.lr.errors import LrError, NoOpenBatch
from tidegate.lr.progress import EmptyBatch, LrLedger, LrMode, LrRules, OnSkip
from tidegate.lr.schedule import Decay, LrSchedule

SCHEDULE = LrSchedule(1e-3, budget=20, decay=Decay.LINEAR)
WORTH = st.fractions(Fraction(1, 7), 6, max_denominator=7)


class Oracle:
    """What happened in the lineage: ids of units, and what each moved."""

    def __init__(self) -> None:
        self.moved: dict[tuple[int, int], Fraction] = {}
        self.held: dict[tuple[int, int], Fraction] = {}
        self.updates: list[tuple[int, str]] = []
        self.empty_moved: dict[int, Fraction] = {}
        self.batch = 0
        self.size = 0
        self.worth = Fraction(0)
        """The worth of one unit of the open batch, which has `size` units."""

    def left(self) -> list[int]:
        seen = self.moved.keys() | self.held.keys()
        return [unit for unit in range(self.size) if (self.batch, unit) not in seen]


class Run(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.truth = Oracle()
        self.told: list[tuple[int, str, list[int], bool]] = []
        """Acknowledgements of this lineage."""
        self.accumulated: list[int] = []
        """Units whose gradients are in no update yet."""
        self.num_updates = 0

    @initialize(mode=st.sampled_from(LrMode), on_skip=st.sampled_from(OnSkip), empty=st.sampled_from(EmptyBatch))
    def begin(self, mode: LrMode, on_skip: OnSkip, empty: EmptyBatch) -> None:
        self.mode, self.on_skip, self.empty = mode, on_skip, empty
        rules = LrRules(3, mode, on_skip, empty, max_consecutive_skips=10**6)
        self.ledger = LrLedger(SCHEDULE, rules)
        self.saved = (encoded(self.ledger), copy.deepcopy(self.truth), list(self.told))

    @precondition(lambda self: not self.truth.size)
    @rule(size=st.integers(1, 12), worth=WORTH, dp=st.integers(1, 4))
    def open(self, size: int, worth: Fraction, dp: int) -> None:
        if size < dp:
            with pytest.raises(LrError):
                self.ledger.opened(self.truth.batch, size, nominal=worth, dp=dp)
            return
        self.ledger = self.ledger.opened(self.truth.batch, size, nominal=worth, dp=dp)
        self.truth.size, self.truth.worth = size, worth / size

    @precondition(lambda self: not self.truth.size)
    @rule(worth=WORTH)
    def empty_batch(self, worth: Fraction) -> None:
        self.ledger = self.ledger.emptied(self.truth.batch, worth)
        if self.mode is LrMode.NOMINAL and self.empty is EmptyBatch.ADVANCE:
            self.truth.empty_moved[self.truth.batch] = worth
        self.truth.batch += 1

    @precondition(lambda self: self.truth.size)
    @rule(count=st.integers(1, 4), from_the_end=st.booleans())
    def accumulate(self, count: int, from_the_end: bool) -> None:
        free = [unit for unit in self.truth.left() if unit not in self.accumulated]
        self.accumulated += free[-count:] if from_the_end else free[:count]

    @rule()
    def resize(self) -> None:
        """Within an accumulation: its gradients are dropped."""
        self.accumulated = []

    @precondition(lambda self: self.accumulated)
    @rule(is_finite=st.booleans())
    def step(self, is_finite: bool) -> None:
        update, units = f"u{self.num_updates}", self.accumulated
        self.num_updates, self.accumulated = self.num_updates + 1, []
        self._tell(self.truth.batch, update, units, is_finite)
        self.told.append((self.truth.batch, update, units, is_finite))
        if is_finite:
            self.truth.updates.append((self.truth.batch, update))
        moves = is_finite or (self.on_skip is OnSkip.ADVANCE and self.mode is LrMode.NOMINAL)
        where = self.truth.moved if moves else self.truth.held
        where.update({(self.truth.batch, unit): self.truth.worth for unit in units})

    def _tell(self, batch: int, update: str, units: list[int], is_finite: bool) -> None:
        take = self.ledger.committed_update if is_finite else self.ledger.skipped_update
        self.ledger = take(batch, update, units)

    @precondition(lambda self: self.told)
    @rule(which=st.integers(0, 99))
    def replay(self, which: int) -> None:
        self._tell(*self.told[which % len(self.told)])

    @precondition(lambda self: self.truth.batch)
    @rule(is_finite=st.booleans())
    def tell_the_last_batch_what_it_never_had(self, is_finite: bool) -> None:
        with pytest.raises(NoOpenBatch):
            self._tell(self.truth.batch - 1, "never told", [0], is_finite)

    @precondition(lambda self: self.truth.size)
    @rule()
    def close(self) -> None:
        if self.truth.left():
            with pytest.raises(LrError):
                self.ledger.closed(self.truth.batch)
            return
        self.ledger = self.ledger.closed(self.truth.batch)
        self.truth.batch, self.truth.size = self.truth.batch + 1, 0

    @rule()
    def save(self) -> None:
        self.saved = (encoded(self.ledger), copy.deepcopy(self.truth), list(self.told))

    @rule(times=st.integers(1, 2))
    def crash_and_restore(self, times: int) -> None:
        text, truth, told = self.saved
        for _ in range(times):
            self.ledger = decoded(text)
        self.truth, self.told, self.accumulated = copy.deepcopy(truth), list(told), []

    @invariant()
    def progress_is_what_the_consumed_units_are_worth(self) -> None:
        if not hasattr(self, "ledger"):
            return
        truth = self.truth
        if self.mode is LrMode.NOMINAL:
            want = sum(truth.moved.values(), Fraction(0)) + sum(truth.empty_moved.values(), Fraction(0))
        else:
            want = Fraction(len(truth.updates))
        assert self.ledger.progress == want
        assert self.ledger.num_units == len(truth.moved) + len(truth.held)
        assert self.ledger.num_updates == len(truth.updates)
        pending = list(self.ledger.open_batch.pending) if self.ledger.open_batch else []
        assert pending == truth.left()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
