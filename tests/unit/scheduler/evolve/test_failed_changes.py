"""Starts, stops and iterations that fail or are not done in time."""

from __future__ import annotations

import itertools

import pytest

from services.scheduler.decide.decision import decide
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import Phase
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import NODES, spec
from tests.unit.scheduler.open_iteration import deliver_all, iterating
from tidegate.ownership.records import Outcome
from tidegate.types import Role, instance_id


def test_a_component_that_fails_to_start_again_and_again_fails_the_job_after_pauses() -> None:
    drive = booted(FakeCluster(spec(), has_supervisor=False))
    drive.cluster.kill_instance(instance_id(Role.ROLLOUT, NODES[1]), tells=False)
    began_ms = drive.now_ms

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert state.message.startswith(
        "the rollout failed to start 4 times in a row, the last time: rollout@n0: rollout@n1 is gone; see its logs"
    )
    assert drive.now_ms - began_ms >= 42_000


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.INFERENCE])
def test_a_failed_iteration_continues_once_its_component_was_started_anew_and_loaded_the_weights(
    role: Role,
) -> None:
    drive = iterating()
    drive.cluster.fail_iteration(role)
    deliver_all(drive)

    commands = [
        command
        for command in drive.cluster.log
        if isinstance(command, cmd.ScaleUp | cmd.LoadWeights | cmd.OpenIteration) and command.header.role is role
    ]
    up, load = commands[-2:]
    assert isinstance(up, cmd.ScaleUp)
    assert isinstance(load, cmd.LoadWeights)
    assert load.weights == drive.state.snapshots[0]
    state = drive.run()
    assert (state.phase, state.incarnation) == (Phase.FINISHED, 1)


def test_a_start_that_is_not_done_by_its_deadline_is_closed_and_counts_as_failed() -> None:
    drive = booted(FakeCluster(spec(deadline_ms=60_000), hung={Role.ROLLOUT}))
    drive.run_until(lambda state: state.transition_of(Role.ROLLOUT) is not None)
    transition = drive.state.transition_of(Role.ROLLOUT)
    assert transition is not None
    names = itertools.cycle(instance_id(Role.ROLLOUT, node) for node in reversed(NODES))
    while drive.now_ms < transition.deadline_unix_ms:
        assert drive.cluster.store.records[transition.id].is_open, "each new lead gets the command again"
        drive.now_ms += 50_000
        drive.cluster.elect(next(names))
        deliver_all(drive)

    assert drive.cluster.store.records[transition.id].outcome is Outcome.ABORTED
    rollout = drive.state.components[Role.ROLLOUT]
    assert (rollout.num_failed_starts, rollout.last_failure) == (1, "it was not done")
    drive.cluster.hung.clear()
    assert drive.run().phase is Phase.FINISHED


def test_a_stop_that_is_not_done_by_its_deadline_ends_the_job_with_what_was_not_given_back() -> None:
    drive = iterating()
    drive.cluster.hung.add(Role.INFERENCE)
    drive.cluster.voice.say("control", ev.JobCancelRequested("enough"))
    deliver_all(drive)
    transition = drive.state.transition_of(Role.INFERENCE)
    assert transition is not None

    decision = decide(drive.state, transition.deadline_unix_ms, policy=StaticPolicy())

    (finish,) = decision.commands
    assert isinstance(finish, cmd.FinishJob)
    assert f"{transition.id} was not done by its deadline, 2 of 2 GPUs still draining" in finish.message
    assert "2 GPUs not given back (n0/2, n1/2)" in finish.message
