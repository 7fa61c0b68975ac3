"""A store's clock that is set back delays no deadline by more than its own length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.turn import Turn, finish
from services.scheduler.evolve.clock import seen_at
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Absence
from services.scheduler.state.invariants import check
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tidegate.types import Token

BACK_MS = 600_000


@pytest.fixture(scope="module")
def waiting() -> ClusterState:
    """A job that waits for the effect of commands."""
    return booted(FakeCluster(spec())).run_until(lambda state: bool(state.expectations))


def last_issued_ms(state: ClusterState) -> int:
    return max(each.issued_ms for each in state.expectations.values())


def test_a_clock_that_goes_on_changes_nothing(waiting: ClusterState) -> None:
    now_ms = last_issued_ms(waiting)
    assert seen_at(waiting, now_ms) is waiting
    assert seen_at(waiting, now_ms + BACK_MS) is waiting


def test_a_deadline_is_as_far_away_after_the_clock_went_back_as_it_was_at_first(waiting: ClusterState) -> None:
    now_ms = last_issued_ms(waiting) - BACK_MS
    seen = seen_at(replace(waiting, ask_at_ms=now_ms + BACK_MS), now_ms)
    for key, each in waiting.expectations.items():
        assert (seen.expectations[key].issued_ms, seen.expectations[key].due_ms) == (
            now_ms,
            now_ms + each.due_ms - each.issued_ms,
        )
    assert seen.ask_at_ms == now_ms
    assert not list(check(waiting, seen))


def test_an_absence_counts_from_the_next_decision_on_and_a_long_one_stays_long() -> None:
    state = ClusterState(job=JOB, absent={gpu("n1", 1): Absence(Token(1, 5), 2 * BACK_MS, is_long=True)})
    seen = seen_at(state, BACK_MS)
    assert seen.absent == {gpu("n1", 1): Absence(Token(1, 5), None, is_long=True)}


def test_a_command_without_effect_is_issued_again_within_its_deadline_after_the_clock_went_back(
    waiting: ClusterState,
) -> None:
    back_ms = last_issued_ms(waiting) - BACK_MS
    seen = finish(Turn((waiting,)), back_ms, StaticPolicy()).after
    due_ms = next_due_ms(seen)
    assert due_ms is not None
    assert due_ms - back_ms <= max(each.due_ms - each.issued_ms for each in waiting.expectations.values())
    again = finish(Turn((seen,)), due_ms, StaticPolicy()).decision
    assert again is not None
    assert again.commands
