"""A state that the store lost: what the stream alone shows of the job, and how the job continues from there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.recovering import recovered
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.invariants import check
from services.scheduler.state.values import Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tidegate.ownership import transitions
from tidegate.ownership.records import GpuRecord, GpuState, Outcome, Part, PartKind, Transition
from tidegate.types import Layout, Role, TransitionId


def history(drive: Drive) -> list[ev.Event]:
    """The job's events as the stream has them."""
    return [replace(event, stream_sequence=number) for number, event in enumerate(drive.delivered, start=1)]


def after_two_iterations() -> Drive:
    drive = booted(FakeCluster(spec(num_iterations=4)))
    drive.run_until(lambda state: state.next_iteration == 2 and state.iteration is not None)
    while drive.cluster.outbox:
        drive.step()
    return drive


def lose_the_store(drive: Drive) -> None:
    """The store's server comes back empty and is adopted. Only the gates still have records of the GPUs."""
    drive.cluster.store.records.clear()
    for slot, gate in drive.cluster.gates.items():
        state = GpuState.LOST if gate.is_held else GpuState.FREE
        drive.cluster.store.gpus[slot] = GpuRecord(slot, state, None, gate.highest)
    drive.state = recovered(ClusterState(job=JOB), history(drive))


def test_a_lost_state_is_made_again_up_to_the_last_checkpoint_in_an_incarnation_of_its_own() -> None:
    drive = after_two_iterations()

    state = recovered(ClusterState(job=JOB), history(drive))

    assert (state.phase, state.incarnation, state.next_iteration, state.next_version) == (Phase.STARTING, 2, 2, 2)
    assert [each.iteration for each in state.summaries if not each.is_superseded] == [0, 1]
    assert state.summaries[:2] == drive.state.summaries
    assert state.checkpoint == drive.state.checkpoint
    assert {role: state.lead_of(role) for role in Role} == {role: drive.state.lead_of(role) for role in Role}
    assert not any(component.grants for component in state.components.values())
    assert "events were read again, and it goes on from checkpoint inc001-it000002" in state.message
    assert check(ClusterState(job=JOB), state) == []


def test_a_job_whose_store_came_back_empty_takes_its_gpus_back_from_living_workers_and_finishes() -> None:
    drive = after_two_iterations()
    lose_the_store(drive)

    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 2)
    assert [each.iteration for each in state.summaries if not each.is_superseded] == [0, 1, 2, 3]
    assert not any(gate.is_held for gate in drive.cluster.gates.values())


def test_deaths_before_the_state_was_lost_cost_nothing_when_their_events_are_read_again() -> None:
    drive = after_two_iterations()
    drive.cluster.kill_worker(drive.cluster.job_spec.placement[Role.ACTOR].gpus[0])
    drive.run_until(lambda state: state.next_iteration == 3 and state.iteration is not None)
    assert drive.state.incarnation == 1

    lose_the_store(drive)

    assert (drive.state.incarnation, drive.state.next_iteration) == (2, 3)
    assert drive.run().phase is Phase.FINISHED


def test_restarts_before_the_state_was_lost_are_known_from_later_events() -> None:
    drive = after_two_iterations()
    drive.cluster.keeps_state = False
    drive.cluster.kill_worker(drive.cluster.job_spec.placement[Role.ACTOR].gpus[0])
    drive.run_until(lambda state: state.incarnation == 2 and state.next_iteration == 3 and state.iteration is not None)

    lose_the_store(drive)

    assert (drive.state.incarnation, drive.state.next_iteration) == (3, 3)
    lineage = [(each.iteration, each.incarnation) for each in drive.state.summaries if not each.is_superseded]
    assert lineage == [(0, 1), (1, 1), (2, 2)]
    assert drive.run().phase is Phase.FINISHED


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_fatal_failure_that_is_read_again_ends_no_job(incarnation: int) -> None:
    drive = after_two_iterations()
    drive.cluster.keeps_state = False
    drive.cluster.kill_worker(drive.cluster.job_spec.placement[Role.ACTOR].gpus[0])
    drive.run_until(lambda state: state.incarnation == 2 and state.next_iteration == 3 and state.iteration is not None)
    lead = drive.state.components[Role.ROLLOUT].lead
    assert lead is not None
    drive.cluster.voice.fail_component(lead.instance, "a late word", fatal=True, incarnation=incarnation)
    late = drive.cluster.outbox.pop()

    state = recovered(ClusterState(job=JOB), [*history(drive), late])

    assert (state.phase, state.incarnation) == (Phase.STARTING, 3)


def test_a_wish_outlives_the_end_of_a_suspension_that_the_lost_state_had_planned() -> None:
    drive = after_two_iterations()
    state = recovered(ClusterState(job=JOB), history(drive))
    wish = Placed((gpu("n0", 0),), Layout())
    part = Part(Role.ACTOR, PartKind.SUSPEND, Layout(tp=2), None)
    suspension = Transition(TransitionId(f"{JOB}/1/t9"), JOB, 1, (), (part,), 1, 1, "")
    state = replace(state, asked=wish, transitions={suspension.id: suspension})

    closed = transitions.close(suspension, {}, Outcome.ABORTED).transition
    seen = ev.OwnershipObserved(tuple(state.gpus.values()), (closed,))
    after = evolve(state, ev.Event(job=JOB, source="scheduler", boot=1, sequence=0, body=seen))

    assert (after.asked, after.transitions) == (wish, {})


def test_a_job_that_was_ending_still_ends_after_its_state_is_lost() -> None:
    drive = after_two_iterations()
    drive.cluster.voice.say("control", ev.JobCancelRequested("enough"))
    drive.step()
    lose_the_store(drive)

    assert (drive.state.phase, drive.state.outcome) == (Phase.STOPPING, Phase.CANCELLED)
    assert drive.run().phase is Phase.CANCELLED
    assert not any(gate.is_held for gate in drive.cluster.gates.values())


def test_a_paused_job_stays_paused_after_its_state_is_lost_and_says_what_to_do() -> None:
    drive = after_two_iterations()
    drive.cluster.voice.say("actor", ev.DeadLettered("samples.tide", "not a group", 7))
    drive.run_until(lambda state: state.phase is Phase.PAUSED)
    want = drive.state.message
    lose_the_store(drive)

    assert (drive.state.phase, drive.state.message) == (Phase.PAUSED, want)


def test_a_stream_without_a_submission_restores_no_job() -> None:
    drive = booted(FakeCluster(spec()))
    drive.cluster.outbox.pop()
    while drive.cluster.outbox:
        drive.step()

    state = recovered(ClusterState(job=JOB), history(drive))

    assert (state.phase, state.incarnation, state.spec) == (Phase.SUBMITTED, 0, None)
    assert len(state.instances) == 6
