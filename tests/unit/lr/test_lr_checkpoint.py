"""Checkpoints of the ledger: a load gives the saved ledger, and damaged or foreign texts are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.unit.lr.schedules import Groups
from tidegate.lr.checkpoint import LegacyPolicy, OnMismatch, adopted, decoded, encoded, resumed
from tidegate.lr.errors import BudgetMismatch, CheckpointRefused, ForeignCheckpoint
from tidegate.lr.progress import LrLedger, LrMode, LrRules, OnSkip
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.megatron.lr import drive, param_scheduler

COSINE = LrSchedule(3e-4, budget=2400, warm_up=Fraction(25, 2), decay=Decay.COSINE, minimum=1e-5)
RULES = LrRules(logical_minibatch=6, on_skip=OnSkip.HOLD)


def half_way() -> LrLedger:
    ledger = LrLedger(COSINE, RULES).emptied(0, 1).opened(1, 7)
    return ledger.committed_update(1, "a", [0, 3]).skipped_update(1, "b", [6, 1])


def test_a_saved_ledger_loads_as_the_same_ledger_however_often() -> None:
    text = encoded(half_way())
    assert decoded(text) == half_way()
    assert encoded(decoded(encoded(decoded(text)))) == text


def test_a_checkpoint_without_a_last_batch_loads_and_keeps_the_next_one() -> None:
    raw = json.loads(encoded(half_way()))
    assert raw.pop("last_batch") == {"id": 0, "nominal": [1, 1], "updates": {}, "skips": []}
    ledger = decoded(json.dumps(raw))
    assert ledger == replace(half_way(), last_batch=None)
    closed = ledger.committed_update(1, "c", [2, 4, 5]).closed(1)
    assert json.loads(encoded(closed))["last_batch"]["updates"] == {"a": 2, "b": 2, "c": 3}
    assert decoded(encoded(closed)) == closed


def test_the_json_has_its_unit_whole_numbers_and_the_full_schedule() -> None:
    raw = json.loads(encoded(half_way()))
    assert (raw["version"], raw["unit"], raw["rules"]["mode"]) == (1, "sample x epoch", "nominal")
    assert raw["progress"] == [1, 3]
    assert raw["rules"]["logical_minibatch"] == 6
    want = {"id": 1, "num_units": 7, "nominal": [7, 6], "updates": {"a": [[0, 1], [3, 4]], "b": [[1, 2], [6, 7]]}}
    assert raw["open_batch"] == {**want, "skips": ["b"]}
    assert raw["schedule"]["warm_up"] == [25, 2]
    assert (raw["schedule"]["budget"], raw["schedule"]["decay"], raw["schedule"]["minimum"]) == (2400, "cosine", 1e-5)


Change = Callable[[dict[str, Any]], Any]
DAMAGE: dict[str, tuple[Change, str]] = {
    "of a later version": (lambda raw: raw.update(version=2), "version 2 .* resume with the version that saved it"),
    "of another unit": (lambda raw: raw.update(unit="tokens"), "counts 'tokens'"),
    "without progress": (lambda raw: raw.pop("progress"), "damaged .KeyError: 'progress'"),
    "without rules": (lambda raw: raw["rules"].pop("on_skip"), "damaged .KeyError: 'on_skip'"),
    "without a rate": (lambda raw: raw["schedule"].pop("initial"), "damaged .KeyError: 'initial'"),
    "of float progress": (lambda raw: raw.update(progress=0.33), "damaged .TypeError"),
    "of a float part": (lambda raw: raw.update(progress=[1.0, 3]), "damaged .TypeError: 1.0 is no int"),
    "divided by nothing": (lambda raw: raw.update(progress=[1, 0]), "damaged .ZeroDivisionError"),
    "of other progress": (lambda raw: raw.update(progress=[2, 3]), "does not add up: 2/3 steps of progress"),
    "of negative counts": (lambda raw: raw.update(num_updates=-1), "does not add up"),
    "of a decay that there is not": (lambda raw: raw["schedule"].update(decay="cubic"), "damaged .ValueError"),
    "of a schedule that contradicts itself": (lambda raw: raw["schedule"].update(budget=3), "damaged .ScheduleRefused"),
    "of units beyond the batch": (
        lambda raw: raw["open_batch"]["updates"].update(c=[[6, 9]]),
        "damaged .DuplicateUnit",
    ),
    "of updates that are not there": (lambda raw: raw["open_batch"].update(skips=["z"]), "damaged .LrError"),
    "of a batch out of order": (
        lambda raw: raw["open_batch"].update(id=5),
        "batch 5 is open, 0 was closed last and 1 follows",
    ),
    "of a last batch out of order": (lambda raw: raw["last_batch"].update(id=3), "3 was closed last and 1 follows"),
    "of a last update without units": (
        lambda raw: raw["last_batch"]["updates"].update(a=0),
        "the closed batch 0 holds",
    ),
    "of a last update that no count has": (lambda raw: raw["last_batch"]["updates"].update(a=2), "have 0, 0 and 0"),
    "of a batch without units": (lambda raw: raw["open_batch"].update(num_units=0), "batch 1 has 0 units and owns 7/6"),
    "of a batch without steps": (lambda raw: raw["open_batch"].update(nominal=[0, 1]), "7 units and owns 0 steps"),
    "of an update without units": (lambda raw: raw["open_batch"]["updates"].update(c=[]), "damaged .LrError: batch 1"),
    "of updates that took no unit": (lambda raw: raw.update(num_updates=50), "4 units in 50 updates and 1 skips"),
    "of fewer updates than are open": (lambda raw: raw.update(num_updates=0), "4 units in 0 updates"),
    "of units of no batch": (lambda raw: raw.update(num_units=77), "have 73, 0 and 0 of them for 0 steps"),
    "of fewer units than are open": (lambda raw: raw.update(num_units=3), "have -1, 0 and 0"),
    "of skips of no batch": (lambda raw: raw.update(num_skips=5), "in 1 updates and 5 skips, 1 in a row"),
    "of more skips in a row than in all": (lambda raw: raw.update(num_consecutive_skips=9), "1 skips, 9 in a row"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_ledger_is_refused(case: str) -> None:
    change, want = DAMAGE[case]
    raw = json.loads(encoded(half_way()))
    change(raw)
    with pytest.raises(CheckpointRefused, match=want):
        decoded(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", {}, 3])
def test_a_text_that_is_no_ledger_is_refused(text: Any) -> None:
    with pytest.raises(CheckpointRefused, match="the learning-rate ledger is"):
        decoded(text)


def test_another_budget_is_refused_until_a_setting_chooses_the_schedule() -> None:
    longer = replace(COSINE, budget=3000)
    with pytest.raises(
        BudgetMismatch, match=r"2400 steps, of which 1/3 are done, .* one of 3000 \(budget 2400 and 3000\)"
    ):
        resumed(half_way(), longer, RULES)
    assert resumed(half_way(), longer, RULES, on_mismatch=OnMismatch.CHECKPOINT) == half_way()
    chosen = resumed(half_way(), longer, RULES, on_mismatch=OnMismatch.CONFIG)
    assert (chosen.schedule, chosen.progress) == (longer, Fraction(1, 3)), "progress is never scaled"


def test_a_constant_rate_goes_on_under_another_budget_and_under_no_other_rate() -> None:
    constant = LrSchedule(3e-4, budget=2400, warm_up=Fraction(25, 2))
    saved = replace(half_way(), schedule=constant)
    longer = replace(constant, budget=3000)
    assert resumed(saved, longer, RULES) == replace(saved, schedule=longer)
    with pytest.raises(BudgetMismatch, match=r"peak 0.0003 and 0.0002"):
        resumed(saved, replace(longer, peak=2e-4), RULES)


def test_a_resume_with_the_same_schedule_takes_the_rules_of_the_config() -> None:
    rules = replace(RULES, on_skip=OnSkip.ADVANCE, max_consecutive_skips=9)
    assert resumed(half_way(), COSINE, rules) == replace(half_way(), rules=rules)


@pytest.mark.parametrize(
    "rules", [replace(RULES, logical_minibatch=8), replace(RULES, mode=LrMode.OPTIMIZER_UPDATES)], ids=str
)
def test_another_mode_or_logical_minibatch_is_refused_whatever_the_setting(rules: LrRules) -> None:
    with pytest.raises(CheckpointRefused, match="their steps cannot be compared"):
        resumed(half_way(), COSINE, rules, on_mismatch=OnMismatch.CONFIG)


def overshot() -> dict[str, Any]:
    """The state of Megatron's own scheduler that ROLL's issue 442 shows."""
    scheduler = param_scheduler(
        Groups(), LrSchedule(3e-4, budget=2400, warm_up=10, decay=Decay.COSINE), weight_decay=0.0
    )
    for _ in range(8429):
        scheduler.step(1)
    state: dict[str, Any] = scheduler.state_dict()
    assert (state["num_steps"], state["lr_decay_steps"]) == (8429, 2400)
    return state


def test_foreign_counters_are_refused_with_both_numbers_until_a_policy_is_chosen() -> None:
    with pytest.raises(ForeignCheckpoint, match=r"num_steps=8429 of lr_decay_steps=2400 .* choose rebase"):
        adopted(overshot(), COSINE, RULES)
    with pytest.raises(ForeignCheckpoint, match="num_steps=8429 of lr_decay_steps=2400"):
        decoded(json.dumps(overshot()))


def test_counters_without_a_unit_are_foreign_even_within_their_budget() -> None:
    with pytest.raises(ForeignCheckpoint, match="num_steps=12 of lr_decay_steps=2400"):
        decoded(json.dumps({**overshot(), "num_steps": 12}))


POLICIES: dict[str, tuple[LegacyPolicy, Fraction | None, Fraction, Fraction]] = {
    "what was consumed": (LegacyPolicy.REBASE, Fraction(4801, 4), Fraction(4801, 4), Fraction(0)),
    "theirs, up to the budget": (LegacyPolicy.CLAMP, None, Fraction(2400), Fraction(0)),
    "theirs": (LegacyPolicy.KEEP, None, Fraction(8429), Fraction(6029)),
}


@pytest.mark.parametrize("case", POLICIES)
def test_a_legacy_policy_sets_the_progress_of_foreign_counters(case: str) -> None:
    policy, consumed, want, want_overshoot = POLICIES[case]
    ledger = adopted(overshot(), COSINE, RULES, policy=policy, consumed=consumed, next_batch=40)
    assert (ledger.progress, ledger.overshoot, ledger.next_batch) == (want, want_overshoot, 40)
    assert decoded(encoded(ledger)) == ledger
    going_on = ledger.opened(40, 6).committed_update(40, "a", range(6)).closed(40)
    assert going_on.progress == want + 1
    groups = Groups()
    drive(param_scheduler(groups, COSINE, weight_decay=0.0), going_on)
    assert groups.param_groups[0]["lr"] == going_on.rate
    assert (going_on.rate == COSINE.minimum) == (policy is not LegacyPolicy.REBASE)


@pytest.mark.parametrize("consumed", [None, 1.5, -1])
def test_a_rebase_needs_the_number_of_consumed_steps(consumed: Any) -> None:
    with pytest.raises(ForeignCheckpoint, match="rebase needs the exact number of consumed steps"):
        adopted(overshot(), COSINE, RULES, policy=LegacyPolicy.REBASE, consumed=consumed)


@pytest.mark.parametrize("num_steps", [None, -1, 1.5, True])
def test_a_num_steps_that_is_no_number_of_steps_is_refused(num_steps: Any) -> None:
    with pytest.raises(ForeignCheckpoint, match="is no number of steps"):
        adopted({"num_steps": num_steps}, COSINE, RULES, policy=LegacyPolicy.KEEP)


def test_a_second_load_adds_in_megatrons_scheduler_and_changes_nothing_in_a_ledger() -> None:
    scheduler = param_scheduler(Groups(), COSINE, weight_decay=0.0)
    for _ in range(2):
        scheduler.load_state_dict({**overshot(), "lr_warmup_steps": COSINE.warm_up})
    assert scheduler.num_steps == 2 * 8429
    for _ in range(2):
        drive(scheduler, decoded(encoded(half_way())))
    assert scheduler.num_steps == Fraction(1, 3)
