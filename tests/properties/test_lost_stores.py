"""A job whose stores come back empty, or as they were some events ago, at any time and several times.

- The store of the state: ownership is rebuilt from the gates under a larger term, and the state from the events, or
  from a copy of it and the events since. Leads are elected anew, since their records are gone.
- The streams, with the store or without it: the job is stopped and resumed from its newest checkpoint.

Commands come late, twice, or never meanwhile. A start comes late only where the store was lost meanwhile.
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
from tests.unit.scheduler.lost_store import Saved, lose_store, lose_stream, saved_now

MAX_LOSSES = 3
LOSSES = ("lose store", "save store", "older store", "copied state", "lose stream", "lose both")
COMMANDS = ("delay commands", "late commands", "repeat command")
run_on = st.tuples(st.just("run on"), st.integers(0, 2 * MAX_STEPS_ON))
loss = st.tuples(st.sampled_from(LOSSES), st.integers(0, 7))
command = st.tuples(st.sampled_from(COMMANDS), st.integers(0, 15))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Events, and up to `MAX_LOSSES` losses among them, each somewhere after some progress. Some have deaths too."""
    steps = draw(st.lists(st.one_of(ordinary, ordinary, command), max_size=30))
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
                saved = saved_now(drive)
            case "lose store":
                lose_store(drive, None, begins_late=number % 2 > 0)
            case "older store":
                lose_store(drive, saved, begins_late=number % 2 > 0)
            case "copied state":
                lose_store(drive, saved, is_empty=True, begins_late=number % 2 > 0)
            case "lose stream":
                lose_stream(drive, number, register_term=saved.register_term if saved else 0)
            case "lose both":
                lose_stream(drive, number, register_term=saved.register_term if saved else 0, store=saved or Saved())
            case "delay commands":
                drive.num_delays = 1
            case "late commands":
                drive.cluster.execute_late()
            case "repeat command":
                drive.cluster.repeat(number)
            case _:
                happen(drive, what, number)
    drive.run()
    return drive


def fault(drive: Drive) -> str | None:
    """What is wrong with a job at its end."""
    state, cluster = drive.state, drive.cluster
    if (state.phase, state.message) != (Phase.FINISHED, f"all {NUM_ITERATIONS} iterations are done"):
        return f"the job ended {state.phase}: {state.message}"
    if held := [slot for slot, gate in cluster.gates.items() if gate.is_held]:
        return f"workers hold {held}"
    if owned := [record for record in cluster.store.gpus.values() if record.owner]:
        return f"the store has owners of {owned}"
    lineage = cluster.lineages[state.checkpoint.name] if state.checkpoint is not None else ()
    if [iteration for _, iteration in lineage] != list(range(NUM_ITERATIONS)):
        return f"the weights are trained in {lineage}"
    known = [(each.incarnation, each.iteration) for each in state.summaries if not each.is_superseded]
    want = [each for each in lineage if each in known or not drive.lacks_accounts]
    if known != want:
        return f"the accounts are of {known}, the weights trained in {lineage}"
    if wrong := [each for each in state.summaries if each.num_lost or each.num_duplicates]:
        return f"samples are lost or doubled in {wrong}"
    return None


NUM_PARTS, NUM_HISTORIES = (10, 1000) if effort.IS_FULL else (1, 40)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_job_whose_stores_come_back_poorer_finishes_with_every_sample_once(part: int) -> None:
    @seed(part)
    @settings(max_examples=NUM_HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(histories())
    def finishes(steps: list[tuple[str, int]]) -> None:
        assert fault(finished(steps)) is None

    finishes()
