"""The scheduler decides at once on structural changes, on time at deadlines, and else at a set period."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.pacing import Pace
from services.scheduler.state.cluster_state import ClusterState
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, spec

EVERY_MS = 5000


def test_progress_alone_waits_for_its_time_since_the_last_decision() -> None:
    state, pace = ClusterState(job=JOB), Pace(EVERY_MS, decided_ms=1000)
    assert pace.next_decision_ms(state, 2000) == 6000
    assert not pace.is_due(state, state, 5999)
    assert pace.is_due(state, state, 6000)


def test_a_decision_is_due_at_the_time_that_the_policy_named() -> None:
    state = ClusterState(job=JOB, ask_at_ms=1234)
    assert next_due_ms(state) == 1234
    assert Pace(EVERY_MS, decided_ms=1000).next_decision_ms(state, 1000) == 1234


def test_a_late_time_from_the_policy_delays_no_other_decision() -> None:
    later = ClusterState(job=JOB, ask_at_ms=60_000)
    assert Pace(EVERY_MS, decided_ms=1000).next_decision_ms(later, 1000) == 6000
    expecting = booted(FakeCluster(spec())).run_until(lambda state: bool(state.expectations))
    due_ms = min(each.due_ms for each in expecting.expectations.values())
    asked = replace(expecting, ask_at_ms=due_ms + 1)
    assert Pace(EVERY_MS, decided_ms=due_ms).next_decision_ms(asked, due_ms - 1) == due_ms


def test_a_change_that_raises_the_version_is_decided_on_at_once_and_one_that_is_only_counted_is_not() -> None:
    state, pace = ClusterState(job=JOB, version=3), Pace(EVERY_MS, decided_ms=1000)
    assert pace.is_due(state, replace(state, version=4), 1001)
    assert not pace.is_due(state, replace(state, applied_seq=7, backlog={"q": 1}), 1001)


@pytest.mark.parametrize("pace", [Pace(EVERY_MS), Pace(EVERY_MS, decided_ms=1000, has_news=True)])
def test_a_replica_that_has_not_decided_yet_or_has_changed_the_store_decides_at_once(pace: Pace) -> None:
    state = ClusterState(job=JOB)
    assert pace.next_decision_ms(state, 1001) == 1001
    assert pace.is_due(state, state, 1001)
