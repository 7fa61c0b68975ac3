"""The rollout evaluates the versions that are due while it has no other work, and each evaluation is reported once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.evolve.fold import evolve
from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import NODES, spec
from tidegate.types import Role, instance_id


def job(*, every: int | None, num_iterations: int = 3) -> Drive:
    return booted(FakeCluster(spec(num_iterations=num_iterations, evaluate_every=every)))


def evaluate_commands(drive: Drive) -> list[cmd.Evaluate]:
    return [command for command in drive.cluster.log if isinstance(command, cmd.Evaluate)]


def is_running(version: int, drive: Drive) -> bool:
    """Whether a lead accepted the evaluation and has not reported it yet."""
    lead = drive.cluster.leads[Role.ROLLOUT]
    return lead is not None and lead.evaluated is not None and lead.evaluated.version == version


def while_evaluating(drive: Drive, version: int) -> Drive:
    """Runs until the evaluation runs and all earlier events are folded."""
    drive.run_until(lambda state: is_running(version, drive) and not drive.cluster.outbox)
    return drive


@pytest.mark.parametrize(("every", "want"), [(None, []), (1, [0, 1, 2, 3]), (2, [0, 2, 3]), (3, [0, 3]), (7, [0, 3])])
def test_the_first_version_every_nth_and_the_last_are_evaluated_once(every: int | None, want: list[int]) -> None:
    drive = job(every=every)

    state = drive.run()

    assert (state.phase, state.message) == (Phase.FINISHED, "all 3 iterations are done")
    assert [evaluation.version for evaluation in state.evaluations] == want
    assert [(command.version, command.iteration) for command in evaluate_commands(drive)] == [
        (version, version) for version in want
    ]
    assert [dict(evaluation.metrics) for evaluation in state.evaluations] == [{"reward_mean": v / 10} for v in want]
    assert [(each.generated.num_samples, each.num_lost) for each in state.summaries] == [(8, 0)] * 3


def test_a_version_is_evaluated_once_all_of_its_iteration_is_generated_and_before_it_closes() -> None:
    drive = job(every=1)
    while drive.state.phase is not Phase.FINISHED:
        before = len(evaluate_commands(drive))
        drive.step()
        for command in evaluate_commands(drive)[before:]:
            iteration = drive.state.iteration
            assert command.header.role is Role.ROLLOUT
            assert drive.state.holds(Role.ROLLOUT, command.version)
            assert iteration is None or Role.ROLLOUT in iteration.reports
            assert iteration is None or not iteration.closed
            assert (iteration is None) == (command.version == 3)


def test_the_inference_does_not_load_the_last_version() -> None:
    drive = job(every=2)
    drive.run()
    loads = [
        (each.header.role, each.weights.version) for each in drive.cluster.log if isinstance(each, cmd.LoadWeights)
    ]
    assert (Role.ROLLOUT, 3) in loads
    assert (Role.INFERENCE, 3) not in loads
    assert (Role.INFERENCE, 2) in loads


def test_the_rollout_keeps_a_version_until_the_versions_evaluation_is_reported() -> None:
    drive = while_evaluating(job(every=1), 1)
    assert drive.state.iteration is not None
    assert drive.state.iteration.reports.keys() >= {Role.ROLLOUT, Role.ACTOR}
    assert not drive.state.iteration.is_accounted
    assert drive.state.target_version == 1
    assert "the rollout evaluates version 1" in drive.last_reason


@pytest.mark.parametrize("version", [1, 3])
def test_a_new_rollout_lead_evaluates_again_and_the_version_is_reported_once(version: int) -> None:
    drive = while_evaluating(job(every=1), version)
    drive.cluster.move_lead(Role.ROLLOUT)

    state = drive.run()

    assert [evaluation.version for evaluation in state.evaluations] == [0, 1, 2, 3]
    epochs = [command.header.lead_epoch for command in evaluate_commands(drive) if command.version == version]
    assert epochs == [1, 2]


def test_a_new_rollout_lead_evaluates_only_after_it_has_opened_the_iteration() -> None:
    """Otherwise it would open the iteration in the middle of the evaluation, which would end the evaluation."""
    drive = while_evaluating(job(every=1), 1)
    drive.cluster.move_lead(Role.ROLLOUT)
    drive.run()
    sent = [
        type(command)
        for command in drive.cluster.log
        if isinstance(command, cmd.OpenIteration | cmd.Evaluate) and command.header.role is Role.ROLLOUT
    ]
    assert sent[2:6] == [cmd.OpenIteration, cmd.Evaluate, cmd.OpenIteration, cmd.Evaluate]


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_lead_runs_a_broken_off_evaluation_again_once_it_has_engines(version: int) -> None:
    drive = while_evaluating(job(every=1), version)
    drive.cluster.fail_iteration(Role.ROLLOUT)

    state = drive.run()

    assert [evaluation.version for evaluation in state.evaluations] == [0, 1, 2, 3]
    assert [command.version for command in evaluate_commands(drive)] == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", [DynaRLPolicy(DynaRLRules(low_for_s=1.0)), TidePolicy()])
def test_an_evaluation_gets_engines_once_the_actor_has_reported_whatever_pictures_say(policy: Policy) -> None:
    """The trainer has the rollout's GPUs. A picture after its report says that it has work left."""
    drive = job(every=1, num_iterations=1)
    drive.policy = policy
    drive.run_until(lambda state: state.iteration is not None and Role.ROLLOUT in state.iteration.reports)
    drive.run_until(lambda _: (lead := drive.cluster.leads[Role.ACTOR]) is not None and lead.has_reported)
    drive.cluster.show(Role.ACTOR, eighths=4)

    state = drive.run()

    assert [evaluation.version for evaluation in state.evaluations] == [0, 1]


@pytest.mark.parametrize("policy", [DynaRLPolicy(DynaRLRules(low_for_s=1.0)), TidePolicy()])
def test_a_new_rollout_lead_without_engines_keeps_no_actor_from_its_work(policy: Policy) -> None:
    """The generated samples are on the stream, so the actor needs no rollout."""
    drive = job(every=1, num_iterations=1)
    drive.policy = policy
    drive.run_until(lambda state: state.iteration is not None and Role.ROLLOUT in state.iteration.reports)
    drive.cluster.move_lead(Role.ROLLOUT)

    state = drive.run()

    assert [evaluation.version for evaluation in state.evaluations] == [0, 1]


def report(drive: Drive) -> ev.Event:
    """The last report of an evaluation."""
    return next(event for event in reversed(drive.delivered) if isinstance(event.body, ev.EvaluationReported))


def after_another_report(drive: Drive, *, version: int) -> ClusterState:
    """The state after another report with the number `version` from the source of the last report."""
    known = report(drive)
    assert isinstance(known.body, ev.EvaluationReported)
    body = replace(known.body, version=version, metrics=(("reward_mean", 9.0),))
    clock = drive.state.clocks[known.source]
    another = replace(
        known, body=body, boot=clock.boot, sequence=clock.through + 1, incarnation=drive.state.incarnation
    )
    return evolve(drive.state, another)


def test_a_repeated_evaluation_report_and_one_of_an_older_version_change_nothing() -> None:
    drive = job(every=2)
    drive.run_until(lambda state: len(state.evaluations) == 1)
    for version in (0, 1):
        after = after_another_report(drive, version=version)
        assert after.evaluations == drive.state.evaluations
        assert after.version == drive.state.version


def test_versions_after_the_checkpoint_are_evaluated_again_in_the_next_incarnation() -> None:
    drive = job(every=1)
    drive.cluster.checkpoint_every = 2
    while_evaluating(drive, 3)
    assert [evaluation.version for evaluation in drive.state.evaluations] == [0, 1, 2]
    drive.cluster.kill_instance(instance_id(Role.ACTOR, NODES[0]), tells=True)
    drive.run_until(lambda state: state.incarnation == 2)
    assert [evaluation.version for evaluation in drive.state.evaluations] == [0, 1, 2], "the checkpoint has version 2"

    state = drive.run()

    assert [(each.version, each.incarnation) for each in state.evaluations] == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_a_job_that_is_cancelled_waits_for_no_evaluation() -> None:
    drive = while_evaluating(job(every=1), 1)
    drive.cluster.voice.say("control", ev.JobCancelRequested("enough"))

    state = drive.run()

    assert state.phase is Phase.CANCELLED
