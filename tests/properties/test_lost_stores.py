"""A job whose store comes back empty, or as it was some events ago, at any time and several times.

What the store has lost is rebuilt as the shell does it: ownership from the gates under a larger term, the state from
the events, or from a copy of it and the events since. Leads are elected anew, since their records are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from services.scheduler.evolve.recovering import recovered
from services.scheduler.state.cluster_state import ClusterState, Phase
from tests import effort
from tests.properties.job_histories import MAX_BLOWS, MAX_STEPS_ON, NUM_ITERATIONS, SLOTS, blow, happen, ordinary
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, spec
from tidegate.ownership.adoption import rebuild
from tidegate.ownership.records import GateState, GpuRecord, Transition
from tidegate.ports.store import StoreContents
from tidegate.types import GpuId, Role, Token, TransitionId, node_of

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


@dataclass
class Saved:
    """The store and the state at an earlier time, and how many events were delivered by then."""

    gpus: dict[GpuId, GpuRecord]
    records: dict[TransitionId, Transition]
    state: ClusterState
    num_delivered: int


def lose_store(drive: Drive, saved: Saved | None, *, is_empty: bool = False) -> None:
    """The store comes back empty, or as it was saved. `is_empty`: only the state was saved, elsewhere."""
    cluster, store = drive.cluster, drive.cluster.store
    contents = StoreContents((), ())
    if saved is not None and not is_empty:
        opened = [each for each in saved.records.values() if each.is_open]
        contents = StoreContents(tuple(saved.gpus.values()), tuple(opened))
    reports = {
        node: [
            GateState(slot, gate.highest, gate.is_held)
            for slot, gate in cluster.gates.items()
            if node_of(slot) == node and gate.highest > Token(0, 0)
        ]
        for node in NODES
    }
    rebuilt = rebuild(contents, reports)
    store.term += 1
    store.gpus = {record.gpu: record for record in rebuilt.gpus}
    store.records = {each.id: each for each in rebuilt.transitions}
    store.register(cluster.job_spec.gpus)
    cluster.answers.clear()
    before = saved.state if saved is not None else ClusterState(job=JOB)
    missed = drive.delivered[saved.num_delivered if saved is not None else 0 :]
    drive.state = recovered(before, missed) if missed else before
    store.saved_version = drive.state.version
    for instance in cluster.instances.values():
        # Its lease is gone: it joins again.
        instance.has_lease = instance.has_lease and not instance.is_alive
    for role in Role:
        cluster.move_lead(role)
    cluster.renew()


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
