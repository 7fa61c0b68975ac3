"""The ledger of learning-rate progress, case by case."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from tidegate.lr.errors import (
    BatchOpen,
    BatchRefused,
    DuplicateUnit,
    LrError,
    NominalRefused,
    NoOpenBatch,
    OverConsumption,
    RanksDisagree,
    TooManySkips,
    UnitsLeft,
    UnknownUnit,
    UpdateConflict,
)
from tidegate.lr.progress import EmptyBatch, LrLedger, LrMode, LrRules, OnSkip, agreed_mark, projected_overshoot
from tidegate.lr.schedule import Decay, LrSchedule

LINEAR = LrSchedule(1.0, budget=8, decay=Decay.LINEAR)
BY_UPDATES = {"mode": LrMode.OPTIMIZER_UPDATES}


def new(**rules: Any) -> LrLedger:
    return LrLedger(LINEAR, LrRules(**{"logical_minibatch": 4, **rules}))


def test_updates_of_a_batch_move_progress_by_their_share_of_its_steps() -> None:
    ledger = new().opened(0, 8)
    seen = []
    for update, units in {"a": range(5), "b": [6, 5], "c": [7]}.items():
        seen.append((ledger.progress, ledger.rate))
        ledger = ledger.committed_update(0, update, units)
    assert seen == [(0, 1.0), (Fraction(5, 4), 1 - 5 / 32), (Fraction(7, 4), 1 - 7 / 32)]
    ledger = ledger.closed(0)
    assert (ledger.progress, ledger.nominal, ledger.num_updates, ledger.num_units) == (Fraction(2), Fraction(2), 3, 8)


def test_a_batch_may_own_another_number_of_steps_than_its_size_gives() -> None:
    ledger = new().opened(0, 3, nominal=Fraction(5, 2)).committed_update(0, "a", range(2))
    assert ledger.progress == Fraction(5, 3)


def test_in_mode_optimizer_updates_each_applied_update_is_one_step() -> None:
    ledger = new(**BY_UPDATES).opened(0, 8)
    for unit in range(8):
        ledger = ledger.committed_update(0, str(unit), [unit])
    assert (ledger.progress, ledger.nominal) == (Fraction(8), Fraction(2))


def test_a_short_last_group_moves_its_real_share() -> None:
    ledger = new().opened(0, 10, nominal=3)
    for first in (0, 4, 8):
        ledger = ledger.committed_update(0, str(first), range(first, min(first + 4, 10)))
    assert ledger.closed(0).progress == 3


def test_num_steps_is_an_int_where_progress_is_whole() -> None:
    ledger = new().opened(0, 8).committed_update(0, "a", range(2))
    assert (ledger.num_steps, type(ledger.num_steps)) == (Fraction(1, 2), Fraction)
    ledger = ledger.committed_update(0, "b", range(2, 4))
    assert (ledger.num_steps, type(ledger.num_steps)) == (1, int)


EMPTY = {
    "held": (EmptyBatch.HOLD, LrMode.NOMINAL, Fraction(0), Fraction(2)),
    "advanced": (EmptyBatch.ADVANCE, LrMode.NOMINAL, Fraction(2), Fraction(0)),
    "held, where updates count": (EmptyBatch.ADVANCE, LrMode.OPTIMIZER_UPDATES, Fraction(0), Fraction(2)),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_batch_holds_or_advances_progress_and_its_shortfall_is_recorded(case: str) -> None:
    policy, mode, want_progress, want_shortfall = EMPTY[case]
    ledger = new(empty_batch=policy, mode=mode).emptied(0, 2)
    assert (ledger.progress, ledger.shortfall, ledger.nominal) == (want_progress, want_shortfall, Fraction(2))
    assert ledger.emptied(0, 2) == ledger, "a repeat"
    assert ledger.opened(1, 4).open_batch is not None


SKIPS = {
    "advanced": (OnSkip.ADVANCE, LrMode.NOMINAL, Fraction(1, 2), 0),
    "held": (OnSkip.HOLD, LrMode.NOMINAL, 0, Fraction(1, 2)),
    "held, where updates count": (OnSkip.ADVANCE, LrMode.OPTIMIZER_UPDATES, 0, Fraction(1, 2)),
}


@pytest.mark.parametrize("case", SKIPS)
def test_a_skipped_update_advances_progress_or_its_share_is_recorded(case: str) -> None:
    policy, mode, want_progress, want_skipped = SKIPS[case]
    ledger = new(on_skip=policy, mode=mode).opened(0, 8).skipped_update(0, "a", range(2))
    assert (ledger.progress, ledger.skipped) == (want_progress, want_skipped)
    assert (ledger.num_updates, ledger.num_skips, ledger.num_units) == (0, 1, 2)
    assert (ledger.committed, ledger.mark) == (Fraction(0), "")
    assert list(ledger.next_units(1)) == [2], "its units are not trained on again"


def test_too_many_consecutive_skips_are_an_error_and_an_applied_update_resets_their_count() -> None:
    ledger = new(max_consecutive_skips=2).opened(0, 8)
    for update, units in {"a": [0], "b": [1]}.items():
        ledger = ledger.skipped_update(0, update, units)
    with pytest.raises(TooManySkips, match="3 updates in a row were skipped, the last c of batch 0; at most 2"):
        ledger.skipped_update(0, "c", [2])
    ledger = ledger.committed_update(0, "c", [2])
    assert ledger.skipped_update(0, "d", [3]).num_consecutive_skips == 1


REPLAYS: dict[str, Callable[[LrLedger], LrLedger]] = {
    "an update": lambda ledger: ledger.committed_update(2, "a", [0, 1]),
    "a skip": lambda ledger: ledger.skipped_update(2, "b", [2]),
    "an update of a closed batch": lambda ledger: ledger.committed_update(1, "a", range(4)),
    "a skip of a closed batch": lambda ledger: ledger.skipped_update(1, "s", [4]),
    "a close": lambda ledger: ledger.closed(1),
    "an empty batch": lambda ledger: ledger.emptied(0, 1),
    "anything of an older batch": lambda ledger: ledger.committed_update(0, "unknown", [99]),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_a_repeated_report_changes_nothing(case: str) -> None:
    ledger = one_closed().opened(2, 4)
    ledger = ledger.committed_update(2, "a", range(2)).skipped_update(2, "b", [2])
    assert REPLAYS[case](ledger) == ledger


def one_closed() -> LrLedger:
    ledger = new().emptied(0, 1).opened(1, 5)
    return ledger.committed_update(1, "a", range(4)).skipped_update(1, "s", [4]).closed(1)


NO_REPLAYS: dict[str, tuple[Callable[[LrLedger], object], type[LrError], str]] = {
    "an unknown update": (
        lambda of: of.committed_update(1, "z", [0]),
        NoOpenBatch,
        "batch 1 is closed, and none of its 2 updates is z",
    ),
    "an unknown skip": (lambda of: of.skipped_update(1, "z", [0]), NoOpenBatch, "none of its 2 updates is z"),
    "an update of other units": (
        lambda of: of.committed_update(1, "a", range(3)),
        UpdateConflict,
        "was reported with 4 units and comes again with 3",
    ),
    "an applied one as skipped": (lambda of: of.skipped_update(1, "a", range(4)), UpdateConflict, "update a"),
    "a skipped one as applied": (lambda of: of.committed_update(1, "s", [4]), UpdateConflict, "update s"),
    "a trained batch as empty": (
        lambda of: of.emptied(1, Fraction(5, 4)),
        UpdateConflict,
        "closed with 2 updates and 5/4 steps",
    ),
}


@pytest.mark.parametrize("case", NO_REPLAYS)
def test_a_report_that_the_last_closed_batch_never_had_is_refused(case: str) -> None:
    step, kind, want = NO_REPLAYS[case]
    for ledger in (one_closed(), one_closed().opened(2, 4)):
        with pytest.raises(kind, match=want):
            step(ledger)


def test_a_report_that_contradicts_an_empty_last_batch_is_refused() -> None:
    ledger = new().emptied(0, 1)
    with pytest.raises(UpdateConflict, match="0 updates and 1 steps, and comes again as an empty one of 99"):
        ledger.emptied(0, 99)
    with pytest.raises(NoOpenBatch, match="none of its 0 updates is unknown"):
        ledger.committed_update(0, "unknown", [99])


def test_the_number_of_replicas_changes_neither_the_ledger_nor_the_pending_units() -> None:
    ledger = new().opened(0, 8, dp=4).committed_update(0, "a", [0, 2, 4, 6])
    assert ledger.open_batch is not None
    assert list(ledger.open_batch.pending) == [1, 3, 5, 7]
    assert new().opened(0, 8, dp=1).committed_update(0, "a", [0, 2, 4, 6]) == ledger


def test_past_the_budget_the_rate_stays_at_the_minimum_and_the_overshoot_is_counted() -> None:
    ledger = new()
    for batch in range(3):
        ledger = ledger.opened(batch, 16).committed_update(batch, "a", range(16)).closed(batch)
    assert (ledger.progress, ledger.overshoot, ledger.rate) == (Fraction(12), Fraction(4), 0.0)
    assert new().overshoot == 0


def test_an_overshoot_is_projected_from_the_planned_number_of_updates() -> None:
    assert [projected_overshoot(LINEAR, updates) for updates in (7, 8, 11)] == [0, 0, 3]


def one_open() -> LrLedger:
    return new().opened(0, 4).committed_update(0, "a", [1])


BAD: dict[str, tuple[Callable[[LrLedger], object], type[LrError], str]] = {
    "a second open": (lambda of: of.opened(1, 4), BatchOpen, "batch 1 cannot begin: batch 0 is open"),
    "the same open again": (lambda of: of.opened(0, 4), BatchOpen, "batch 0 cannot begin: batch 0 is open"),
    "an empty batch beside an open one": (lambda of: of.emptied(1, 1), BatchOpen, "batch 1 cannot begin"),
    "an update of another batch": (lambda of: of.committed_update(1, "b", [0]), NoOpenBatch, "batch 1 is not open"),
    "a skip of another batch": (lambda of: of.skipped_update(1, "b", [0]), NoOpenBatch, r"\(0 is\)"),
    "a close of another batch": (lambda of: of.closed(1), NoOpenBatch, "batch 1 is not open"),
    "a close with units left": (lambda of: of.closed(0), UnitsLeft, "3 of 4 units are pending, the first 0"),
    "a unit beyond the batch": (lambda of: of.committed_update(0, "b", [4]), UnknownUnit, "names unit 4; .* has 0-3"),
    "a unit below it": (lambda of: of.committed_update(0, "b", [-1]), UnknownUnit, "names unit -1"),
    "a unit that is none": (lambda of: of.committed_update(0, "b", [0.0]), UnknownUnit, "is no unit"),  # type: ignore[list-item]  # on purpose
    "a unit twice in an update": (
        lambda of: of.committed_update(0, "b", [0, 0]),
        DuplicateUnit,
        "unit 0 occurs twice",
    ),
    "a unit of an earlier update": (lambda of: of.committed_update(0, "b", [1]), DuplicateUnit, "names unit 1, which"),
    "more units than are pending": (
        lambda of: of.committed_update(0, "b", range(4)),
        OverConsumption,
        "consumes 4 units, 3 of 4 are pending",
    ),
    "more units asked for than are pending": (lambda of: of.next_units(4), OverConsumption, "4 units are requested"),
    "an update of nothing": (lambda of: of.committed_update(0, "b", []), UnknownUnit, "names no unit"),
    "an update id with other units": (
        lambda of: of.committed_update(0, "a", [2]),
        UpdateConflict,
        "update a of batch 0",
    ),
    "an update that was applied as skipped": (lambda of: of.skipped_update(0, "a", [1]), UpdateConflict, "update a"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_to_an_open_batch_is_a_typed_error_and_changes_nothing(case: str) -> None:
    step, kind, want = BAD[case]
    ledger = one_open()
    with pytest.raises(kind, match=want):
        step(ledger)
    assert ledger == one_open()


BAD_BATCHES: dict[str, tuple[Callable[[LrLedger], object], type[LrError], str]] = {
    "no unit": (lambda of: of.opened(0, 0), BatchRefused, "num_units=0 must be an int of 1 or more"),
    "fewer than none": (lambda of: of.opened(0, -1, nominal=1), BatchRefused, "num_units=-1"),
    "a truth of them": (lambda of: of.opened(0, True), BatchRefused, "num_units=True"),
    "half of one": (lambda of: of.opened(0, 0.5), BatchRefused, "num_units=0.5"),  # type: ignore[arg-type]  # on purpose
    "fewer than replicas": (lambda of: of.opened(0, 3, dp=4), BatchRefused, "3 units for dp=4"),
    "no replica": (lambda of: of.opened(0, 3, dp=0), BatchRefused, "dp=0 must be"),
    "no step": (lambda of: of.opened(0, 4, nominal=0), NominalRefused, "nominal=0 is not above 0"),
    "a negative step": (lambda of: of.opened(0, 4, nominal=-2), NominalRefused, "nominal=-2"),
    "a float of steps": (lambda of: of.opened(0, 4, nominal=1.0), NominalRefused, "nominal=1.0 is not exact"),  # type: ignore[arg-type]  # on purpose
    "NaN steps": (lambda of: of.opened(0, 4, nominal=math.nan), NominalRefused, "nominal=nan"),  # type: ignore[arg-type]  # on purpose
    "a truth of steps": (lambda of: of.opened(0, 4, nominal=True), NominalRefused, "nominal=True"),
    "an empty batch of no step": (lambda of: of.emptied(0, 0), NominalRefused, "nominal=0"),
    "one that does not follow": (lambda of: of.opened(1, 4), BatchRefused, "the next batch is 0"),
    "an id that is none": (lambda of: of.opened(-1, 4), BatchRefused, "batch=-1"),
    "an update before any batch": (lambda of: of.committed_update(0, "a", [0]), NoOpenBatch, r"\(none is\)"),
    "units of no batch": (lambda of: of.next_units(1), NoOpenBatch, "no batch is open"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_batch_that_cannot_open_is_a_typed_error_and_changes_nothing(case: str) -> None:
    step, kind, want = BAD_BATCHES[case]
    ledger = new()
    with pytest.raises(kind, match=want):
        step(ledger)
    assert ledger == new()


@pytest.mark.parametrize("rules", [{"logical_minibatch": 0}, {"logical_minibatch": 1.5}, {"max_consecutive_skips": -1}])
def test_rules_out_of_range_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(BatchRefused, match="must be an int of"):
        new(**rules)


def test_ranks_with_different_progress_are_named() -> None:
    mark = one_open().mark
    assert agreed_mark({0: mark, 1: mark}) == mark == "1/4 steps after 1 updates"
    with pytest.raises(RanksDisagree, match=r"ranks \[0, 2\]: 1/4 steps after 1 updates; ranks \[1\]: no update"):
        agreed_mark({0: mark, 1: "", 2: mark})
