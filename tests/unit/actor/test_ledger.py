"""The sample ledger loses and doubles no sample, whatever steps it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.ledger import LedgerError, OpenIteration, SampleLedger, Verdict
from tidegate.types import SampleId

PLAN = OpenIteration(iteration=0, first_prompt=0, num_prompts=3, group_size=2, version=0)


def _group(prompt: int, *, incarnation: int = 0, iteration: int = 0) -> list[SampleId]:
    return [SampleId(incarnation, iteration, prompt, draw) for draw in range(2)]


def _opened() -> SampleLedger:
    return SampleLedger(incarnation=0).opened(PLAN)


def test_an_iteration_closes_when_each_sample_has_a_fate() -> None:
    ledger = _opened().committed("u0", _group(0)).filtered(_group(1), reason="zero_std")
    ledger = ledger.discarded(_group(2), reason="nonfinite_update").closed_now()
    assert ledger.num_trained == 2
    assert [(c.num_trained, c.num_filtered, c.num_discarded) for c in ledger.closed] == [(2, 2, 2)]


def test_missing_samples_are_named_when_an_iteration_cannot_close() -> None:
    with pytest.raises(LedgerError, match=r"4 samples have no fate \(0.0.1.0, 0.0.1.1"):
        _opened().committed("u0", _group(0)).closed_now()


def test_an_iteration_takes_extra_prompts_and_the_next_iteration_begins_after_them() -> None:
    ledger = SampleLedger(incarnation=0).opened(replace(PLAN, max_extra_prompts=2))
    assert ledger.verdict(_group(4)) is Verdict.NEW, "an extra group may arrive before the group that it replaces"
    assert ledger.verdict(_group(5)) is Verdict.NOT_EXPECTED
    ledger = ledger.filtered(_group(1), reason="zero_std").committed("u0", _group(0) + _group(2) + _group(3))
    ledger = ledger.taking(4).closed_now()
    assert (ledger.next_prompt, ledger.num_trained) == (4, 6)
    assert SampleLedger.from_json(ledger.to_json()) == ledger
    ledger.opened(replace(PLAN, iteration=1, first_prompt=4))
    with pytest.raises(LedgerError, match="iteration 1 cannot open at prompt 3: the next prompt is 4"):
        ledger.opened(replace(PLAN, iteration=1, first_prompt=3))


def test_an_iteration_closes_with_the_prompts_that_it_took() -> None:
    ledger = SampleLedger(incarnation=0).opened(replace(PLAN, max_extra_prompts=2))
    ledger = ledger.committed("u0", [sample for prompt in range(4) for sample in _group(prompt)])
    with pytest.raises(LedgerError, match=r"2 samples have a fate though it did not take their prompts, 0.0.3.0"):
        ledger.closed_now()
    with pytest.raises(LedgerError, match="2 samples have no fate"):
        ledger.taking(5).closed_now()
    with pytest.raises(LedgerError, match="cannot take 6 prompts: it has 3, at most 5"):
        ledger.taking(6)


REFUSED: dict[str, tuple[Callable[[SampleLedger], SampleLedger], str]] = {
    "a sample trained twice": (
        lambda ledger: ledger.committed("u1", _group(0)),
        "have a fate already, 0.0.0.0",
    ),
    "a trained sample filtered": (lambda ledger: ledger.filtered(_group(0), reason="x"), "have a fate already"),
    "an update committed twice": (lambda ledger: ledger.committed("u0", _group(1)), "update u0 is committed already"),
    "a sample named twice in one step": (
        lambda ledger: ledger.committed("u1", _group(1) * 2),
        "2 samples are named twice",
    ),
    "a sample of another iteration": (
        lambda ledger: ledger.committed("u1", _group(1, iteration=4)),
        "not of the open iteration",
    ),
    "a second iteration while one is open": (lambda ledger: ledger.opened(PLAN), "iteration 0 is open"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_would_break_the_account_is_refused(case: str) -> None:
    step, message = REFUSED[case]
    ledger = _opened().committed("u0", _group(0))
    with pytest.raises(LedgerError, match=message):
        step(ledger)


def test_a_sample_of_another_incarnation_gets_no_fate() -> None:
    foreign = _group(0, incarnation=1)
    with pytest.raises(LedgerError, match=r"2 samples are not of the open iteration, 1\.0\.0\.0"):
        _opened().committed("u0", foreign)
    with pytest.raises(LedgerError, match="not of the open iteration"):
        _opened().filtered(foreign, reason="x")
    with pytest.raises(LedgerError, match="not of the open iteration"):
        _opened().discarded(foreign, reason="x")


def test_a_closed_iteration_never_changes() -> None:
    ledger = _opened().committed("u0", _group(0) + _group(1) + _group(2)).closed_now()
    (want,) = ledger.closed
    with pytest.raises(LedgerError, match="no iteration is open"):
        ledger.discarded(_group(0), reason="x")
    ledger = ledger.opened(replace(PLAN, iteration=1, first_prompt=3))
    with pytest.raises(LedgerError, match="not of the open iteration"):
        ledger.committed("u1", _group(0))
    later = [SampleId(0, 1, prompt, draw) for prompt in range(3, 6) for draw in range(2)]
    assert ledger.filtered(later, reason="x").closed_now().closed[0] == want


def test_num_trained_counts_committed_samples_only() -> None:
    ledger = _opened().committed("u0", _group(0)).filtered(_group(1), reason="x").discarded(_group(2), reason="y")
    assert ledger.num_trained == 2
    assert ledger.closed_now().resumed(1).num_trained == 2


def test_iterations_follow_one_another() -> None:
    with pytest.raises(LedgerError, match="iteration 0 is the next one"):
        SampleLedger(incarnation=0).opened(OpenIteration(2, 0, 1, 1, 0))


VERDICTS = {
    "a group not seen before": (_group(1), Verdict.NEW),
    "a group that is trained": (_group(0), Verdict.SEEN),
    "a group of an earlier incarnation": (_group(1, incarnation=0), Verdict.SUPERSEDED),
    "a group of a later iteration": (_group(1, iteration=5), Verdict.NOT_EXPECTED),
    "a prompt outside the range": (_group(7), Verdict.NOT_EXPECTED),
    "an empty group": ([], Verdict.NOT_EXPECTED),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_group_that_arrives_is_judged_by_its_ids(case: str) -> None:
    ids, want = VERDICTS[case]
    incarnation = 1 if want is Verdict.SUPERSEDED else 0
    ledger = SampleLedger(incarnation=incarnation).opened(PLAN)
    ledger = ledger.committed("u0", _group(0, incarnation=incarnation))
    assert ledger.verdict(ids) is want


def test_a_group_of_a_closed_iteration_is_seen() -> None:
    ledger = _opened().committed("u0", _group(0) + _group(1) + _group(2)).closed_now()
    assert ledger.verdict(_group(1)) is Verdict.SEEN


def test_a_ledger_loaded_from_its_json_is_the_same_and_resumes_only_in_a_later_incarnation() -> None:
    ledger = _opened().committed("u0", _group(0) + _group(1) + _group(2)).closed_now()
    loaded = SampleLedger.from_json(ledger.to_json())
    assert loaded == ledger
    assert loaded.resumed(3).incarnation == 3
    with pytest.raises(LedgerError, match="does not follow"):
        loaded.resumed(0)


def test_a_saved_ledger_whose_numbers_do_not_add_up_is_refused() -> None:
    text = _opened().committed("u0", _group(0) + _group(1) + _group(2)).closed_now().to_json()
    with pytest.raises(LedgerError, match="hold 6 trained samples, num_trained says 7"):
        SampleLedger.from_json(text.replace('"num_trained": 6', '"num_trained": 7'))


@given(st.lists(st.tuples(st.sampled_from(["commit", "filter", "discard"]), st.integers(0, 2)), max_size=12))
def test_whatever_the_steps_each_sample_has_at_most_one_fate(steps: list[tuple[str, int]]) -> None:
    ledger = _opened()
    for number, (step, prompt) in enumerate(steps):
        before = ledger
        try:
            match step:
                case "commit":
                    ledger = ledger.committed(f"u{number}", _group(prompt))
                case "filter":
                    ledger = ledger.filtered(_group(prompt), reason="r")
                case _:
                    ledger = ledger.discarded(_group(prompt), reason="r")
        except LedgerError:
            assert ledger is before
    now = ledger.open_iteration
    assert now is not None
    fates = [*now.trained, *now.filtered.get("r", ()), *now.discarded.get("r", ())]
    assert len(fates) == len(set(fates)) == 2 * len({prompt for _, prompt in steps})
