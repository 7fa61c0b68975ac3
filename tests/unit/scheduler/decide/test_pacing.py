"""A decision is made at once on what changes the structure, on time for what is due, and else every so often."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.pacing import is_structural, next_decision_ms
from services.scheduler.state.cluster_state import ClusterState
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, spec

EVERY_MS = 5000


def test_progress_alone_waits_for_its_time_since_the_last_decision() -> None:
    state = ClusterState(job=JOB)
    assert next_decision_ms(state, decided_ms=1000, decide_every_ms=EVERY_MS) == 6000


def test_the_time_that_a_policy_named_is_kept() -> None:
    state = ClusterState(job=JOB, ask_at_ms=1234)
    assert next_due_ms(state) == 1234
    assert next_decision_ms(state, decided_ms=1000, decide_every_ms=EVERY_MS) == 1234


def test_a_time_named_far_off_puts_nothing_else_off() -> None:
    later = ClusterState(job=JOB, ask_at_ms=60_000)
    assert next_decision_ms(later, decided_ms=1000, decide_every_ms=EVERY_MS) == 6000
    expecting = booted(FakeCluster(spec())).run_until(lambda state: bool(state.expectations))
    due_ms = min(each.due_ms for each in expecting.expectations.values())
    asked = replace(expecting, ask_at_ms=due_ms + 1)
    assert next_decision_ms(asked, decided_ms=due_ms, decide_every_ms=EVERY_MS) == due_ms


def test_what_raises_the_version_is_structural_and_what_is_only_counted_is_not() -> None:
    state = ClusterState(job=JOB, version=3)
    assert is_structural(state, replace(state, version=4))
    assert not is_structural(state, replace(state, applied_seq=7, backlog={"q": 1}))
