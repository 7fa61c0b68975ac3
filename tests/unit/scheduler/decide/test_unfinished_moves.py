"""Moves of GPUs that are refused, overdue, or closed without a layout."""

from __future__ import annotations

import pytest

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.evolve.losses import MAX_FAILED_STARTS
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import Phase
from tests.unit.scheduler.decide.moving_bench import (
    ACTOR,
    HOME,
    OPEN_CHANGES,
    ROLLOUT,
    engines,
    finishes,
    gpus_of,
    propose,
    ready,
    running,
)
from tests.unit.scheduler.fake_parts import NODES
from tidegate.ownership.records import GpuState, Outcome
from tidegate.types import Grant, Role, Token, instance_id


@pytest.mark.parametrize("case", OPEN_CHANGES)
def test_a_change_that_is_overdue_is_closed_and_leaves_the_component_as_it_was(case: str) -> None:
    drive, proposed = running()
    before = {role: drive.state.components[role] for role in Role}
    (role,) = map(Role, OPEN_CHANGES[case])
    drive.cluster.hung.add(role)
    propose(drive, proposed, **OPEN_CHANGES[case])
    transition = drive.state.changing(role)
    assert transition is not None
    assert transition.deadline_unix_ms == drive.now_ms + 2 * drive.cluster.job_spec.command_deadline_ms

    drive.now_ms = transition.deadline_unix_ms
    drive.decide()

    assert drive.cluster.store.records[transition.id].outcome is Outcome.ABORTED
    component = drive.state.components[role]
    assert (component.grants, component.layout) == (before[role].grants, before[role].layout)
    assert component.num_failed_starts == 1
    assert drive.state.transition_of(role) is None, "it is tried again after a pause"
    drive.cluster.hung.clear()
    finishes(drive, proposed)


@pytest.mark.parametrize("case", [case for case in OPEN_CHANGES if not case.startswith("no ")])
def test_a_change_that_the_lead_cannot_make_is_closed_and_made_after_a_pause(case: str) -> None:
    drive, proposed = running()
    (role,) = map(Role, OPEN_CHANGES[case])
    drive.cluster.num_failing_resizes = 2

    propose(drive, proposed, **OPEN_CHANGES[case])
    assert gpus_of(drive.state, role) == HOME[role].gpus
    began_ms = drive.now_ms
    wanted = OPEN_CHANGES[case][role]
    # Nothing but time and the lead's work: the iteration stays open.
    while set(gpus_of(drive.state, role)) != set(wanted.gpus if wanted else ()):
        assert drive.step()

    assert drive.now_ms - began_ms == 10_000, "2 s and 8 s"
    assert drive.state.components[role].num_failed_starts == 0
    finishes(drive, proposed)


def test_growing_fails_again_and_again_without_an_end_of_the_job() -> None:
    drive, proposed = running()
    drive.cluster.has_supervisor = False
    other = drive.cluster.instances[instance_id(Role.ROLLOUT, NODES[1])]
    other.is_alive = False
    began_ms = drive.now_ms

    propose(drive, proposed, actor=None, rollout=engines(*ROLLOUT, ACTOR[1]))
    drive.run_until(lambda state: state.components[Role.ROLLOUT].num_failed_starts == MAX_FAILED_STARTS + 1)

    assert gpus_of(drive.state, Role.ROLLOUT) == ROLLOUT
    assert drive.now_ms - began_ms == 2_000 + 8_000 + 32_000 + 128_000
    other.is_alive = True
    drive.run_until(lambda state: gpus_of(state, Role.ROLLOUT) == (*ROLLOUT, ACTOR[1]))
    finishes(drive, proposed)


def test_a_component_that_never_gives_its_gpus_back_ends_the_job() -> None:
    drive, proposed = running()
    drive.cluster.hung.add(Role.ROLLOUT)
    propose(drive, proposed, **OPEN_CHANGES["fewer engines"])
    for _ in range(200):
        if drive.state.phase is Phase.STOPPING:
            break
        # Nothing but time passes: the iteration stays open.
        due_ms = next_due_ms(drive.state)
        assert due_ms is not None
        drive.now_ms = max(drive.now_ms, due_ms)
        drive.decide()

    want = "the rollout was asked 4 times in a row to give GPUs back without effect"
    assert (drive.state.phase, drive.state.message.startswith(want)) == (Phase.STOPPING, True), drive.state.message


def test_a_job_that_ends_while_gpus_move_gives_all_back() -> None:
    for case in ("fewer engines", "a suspended actor", "a smaller actor"):
        drive, proposed = running()
        ready(drive, proposed, **OPEN_CHANGES[case])
        drive.cluster.voice.say("control", ev.JobCancelRequested("enough"))
        assert drive.run().phase is Phase.CANCELLED
        assert not any(record.owner for record in drive.cluster.store.gpus.values())


def test_a_release_that_arrives_before_its_layout_waits_for_the_layout() -> None:
    drive, proposed = running()
    ready(drive, proposed, rollout=engines(ROLLOUT[0]))
    drive.cluster.work()
    released, committed = drive.cluster.outbox
    drive.deliver(released)
    assert drive.cluster.store.gpus[ROLLOUT[2]].state is GpuState.OWNED
    assert Grant(ROLLOUT[2], Token(1, 1)) in drive.state.components[Role.ROLLOUT].grants

    drive.cluster.outbox.remove(released)
    drive.deliver(committed)
    assert drive.cluster.store.gpus[ROLLOUT[2]].state is GpuState.FREE


def test_gpus_released_in_a_change_that_is_closed_without_its_layout_are_taken_back() -> None:
    drive, proposed = running()
    ready(drive, proposed, rollout=engines(ROLLOUT[0]))
    transition = drive.state.changing(Role.ROLLOUT)
    assert transition is not None
    drive.cluster.work()
    released, committed = drive.cluster.outbox
    drive.cluster.outbox.clear()
    drive.deliver(released)
    drive.now_ms = transition.deadline_unix_ms
    drive.decide()
    drive.deliver(committed)

    assert gpus_of(drive.state, Role.ROLLOUT) == (ROLLOUT[0],)
    assert drive.cluster.store.gpus[ROLLOUT[2]].state is GpuState.FREE
    finishes(drive, proposed)
