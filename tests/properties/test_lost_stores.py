"""A job whose store comes back empty, or as it was some events ago, at any time and several times.

What the store has lost is rebuilt as the shell does it: ownership from the gates under a larger term, the state from
the events, or from a copy of it and the events since. Leads are elected anew, since their records are gone.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from services.scheduler.state.cluster_state import Phase
from tests import effort
from tests.properties.job_histories import MAX_BLOWS, MAX_STEPS_ON, NUM_ITERATIONS, SLOTS, blow, happen, ordinary
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import spec
from tests.unit.scheduler.lost_store import Saved, lose_store

MAX_LOSSES = 3
run_on = st.tuples(st.just("run on"), st.integers(0, 2 * MAX_STEPS_ON))
loss = st.tuples(st.sampled_from(["lose store", "save store", "older store", "copied state"]), st.just(0))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Events, and up to `MAX_LOSSES` losses of the store among them, each somewhere after some progress. Some have
    deaths too."""
    steps = draw(st.lists(ordinary, max_size=30))
    blows = [blow] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, MAX_LOSSES))):
        where = draw(st.integers(0, len(steps)))
        steps[where:where] = [draw(run_on), *map(draw, blows), draw(loss), ("restart", 0)]
    return steps


def finished(steps: list[tuple[str, int]]) -> Drive:
    job = spec(num_iterations=NUM_ITERATIONS, max_actor_restarts=9 * MAX_BLOWS, standby=SLOTS[2:])
    drive = booted(FakeCluster(job))
    saved: Saved | None = None
    for what, number in steps:
        match what:
            case "save store":
                store = drive.cluster.store
                saved = Saved(dict(store.gpus), dict(store.records), drive.state, len(drive.delivered))
            case "lose store":
                lose_store(drive, None)
            case "older store":
                lose_store(drive, saved)
            case "copied state":
                lose_store(drive, saved, is_empty=True)
            case _:
                happen(drive, what, number)
    drive.run()
    return drive


NUM_PARTS, NUM_HISTORIES = (10, 1000) if effort.IS_FULL else (1, 200)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_job_whose_store_comes_back_poorer_finishes_with_every_sample_once(part: int) -> None:
    @seed(part)
    @settings(max_examples=NUM_HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(histories())
    def finishes(steps: list[tuple[str, int]]) -> None:
        drive = finished(steps)

        assert (drive.state.phase, drive.state.message) == (Phase.FINISHED, f"all {NUM_ITERATIONS} iterations are done")
        assert not any(gate.is_held for gate in drive.cluster.gates.values())
        assert not any(record.owner for record in drive.cluster.store.gpus.values())
        lineage = [summary for summary in drive.state.summaries if not summary.is_superseded]
        assert [summary.iteration for summary in lineage] == list(range(NUM_ITERATIONS))
        assert all(summary.num_lost == summary.num_duplicates == 0 for summary in drive.state.summaries)

    finishes()
