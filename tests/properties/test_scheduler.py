"""Whole jobs under whatever may happen.

- Ranks and instances die at every step, leases lapse, leads move, iterations fail.
- The actor is resized at any moment.
- Events come late, twice and out of order. Commands are lost.

`Drive` checks the invariants after every single step, and the fake cluster asserts that no GPU is taken back from a
living worker.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.decide.turn import turn
from services.scheduler.evolve.fold import evolve
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.values import total
from tests.effort import distance, examples
from tests.properties.job_histories import (
    NUM_ITERATIONS,
    finished,
    histories,
    repeatable,
    schedules,
    schedules_with_rank_deaths,
)
from tests.unit.scheduler.fake_parts import JOB, NODES
from tidegate.ownership.records import Outcome, PartKind
from tidegate.types import Role, instance_id

SLOW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(histories(), st.booleans())
def test_whatever_happens_the_job_finishes_and_gives_every_gpu_back(
    steps: list[tuple[str, int]], keeps_state: bool
) -> None:
    drive = finished(steps, keeps_state=keeps_state)

    assert (drive.state.phase, drive.state.message) == (Phase.FINISHED, f"all {NUM_ITERATIONS} iterations are done")
    assert not any(gate.is_held for gate in drive.cluster.gates.values())
    assert not any(record.owner for record in drive.cluster.store.gpus.values())


@SLOW
@given(histories(), st.booleans())
def test_in_the_final_lineage_every_iteration_is_there_once_and_no_sample_is_lost(
    steps: list[tuple[str, int]], keeps_state: bool
) -> None:
    drive = finished(steps, keeps_state=keeps_state)

    lineage = [summary for summary in drive.state.summaries if not summary.is_superseded]
    assert [summary.iteration for summary in lineage] == list(range(NUM_ITERATIONS))
    for summary in drive.state.summaries:
        accounted = total((summary.trained, *summary.filtered, *summary.discarded))
        assert (accounted.num_samples, accounted.ids_digest) == (
            summary.generated.num_samples,
            summary.generated.ids_digest,
        )
    assert all(summary.trained.num_samples for summary in lineage)
    assert [evaluation.version for evaluation in drive.state.evaluations] == [0, NUM_ITERATIONS]


@SLOW
@given(schedules())
def test_resizes_alone_cost_no_incarnation_no_sample_and_no_failed_start(steps: list[tuple[str, int]]) -> None:
    drive = finished([(what, number) for what, number in steps if what != "lose commands"])

    assert drive.state.incarnation == 1
    assert [summary.is_superseded for summary in drive.state.summaries] == [False] * NUM_ITERATIONS
    assert not any(component.num_failed_starts for component in drive.state.components.values())
    records = drive.cluster.store.records.values()
    of_actor = [(part.kind, record.outcome) for record in records for part in record.parts if part.role is Role.ACTOR]
    assert [kind for kind, _ in of_actor].count(PartKind.START) == 1
    assert (PartKind.RESIZE, Outcome.OPEN) not in of_actor


@SLOW
@given(schedules_with_rank_deaths())
def test_deaths_of_ranks_once_the_first_iteration_is_open_cost_no_incarnation_and_no_sample(
    steps: list[tuple[str, int]],
) -> None:
    drive = finished([(what, number) for what, number in steps if what not in ("lose commands", "fail resize")])

    assert (drive.state.incarnation, drive.state.num_restarts) == (1, 0)
    assert [summary.is_superseded for summary in drive.state.summaries] == [False] * NUM_ITERATIONS
    assert all(summary.num_lost == summary.num_duplicates == 0 for summary in drive.state.summaries)
    assert not any(component.num_failed_starts for component in drive.state.components.values())


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_a_replica_that_reads_the_same_history_decides_the_same_byte_for_byte(steps: list[tuple[str, int]]) -> None:
    drive = finished(steps)

    state = ClusterState(job=JOB)
    policy = StaticPolicy()
    events: list[ev.Event] = []
    for event, now_ms, want in drive.seen:
        if event is not None:
            events.append(event)
        if want is not None:
            made = turn(state, now_ms, policy, events=events)
            assert repr(made.decision) == repr(want)
            state, events = decode_state(encode_state(made.after)), []
    assert encode_state(state) == encode_state(drive.state)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_each_command_takes_effect_once_under_one_lead(steps: list[tuple[str, int]]) -> None:
    drive = finished(steps)

    assert len(drive.cluster.effects) == len(set(drive.cluster.effects))
    opened = [effect for effect in drive.cluster.effects if "/open/" in effect]
    assert len({effect.rpartition("/a")[0] for effect in opened}) == len(opened)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.randoms(use_true_random=False))
def test_events_of_a_finished_job_told_again_in_any_order_change_nothing(
    steps: list[tuple[str, int]], shuffler: object
) -> None:
    drive = finished(steps)
    state = drive.state

    again = repeatable(drive)
    shuffler.shuffle(again)  # type: ignore[attr-defined]  # hypothesis's own Random, seeded by the example
    for event in again:
        state = evolve(state, event)

    assert (state.phase, state.version, state.summaries) == (
        drive.state.phase,
        drive.state.version,
        drive.state.summaries,
    )


def test_every_instance_may_die_at_every_step_of_a_job() -> None:
    names = [instance_id(role, node) for role in Role for node in NODES]
    num_steps = len(finished([]).delivered)
    for name in names:
        for at_step in range(0, num_steps, distance(4)):
            number = sorted(names).index(name)
            steps = [("deliver", 0)] * at_step + [("kill instance", number)]
            assert finished(steps).state.phase is Phase.FINISHED, f"{name} died at step {at_step}"
