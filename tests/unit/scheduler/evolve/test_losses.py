"""The cost of a death: an engine, a world, or an incarnation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.evolve.losses import MAX_DEATHS
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import Phase
from services.scheduler.state.components import Working
from services.scheduler.state.values import Placed, total
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import NODES, gpu, spec
from tests.unit.scheduler.open_iteration import deliver_all, is_iterating, iterating
from tidegate.types import Grant, Layout, Role, Token, instance_id

ROLLOUT_GPU = gpu("n1", 3)
INFERENCE_GPU = gpu("n1", 2)
ACTOR_GPU = gpu("n1", 0)


def ups_of(drive: Drive, role: Role) -> list[cmd.ScaleUp]:
    ups = [command for command in drive.cluster.log if isinstance(command, cmd.ScaleUp)]
    return [command for command in ups if command.header.role is role]


def starts_of_actor(drive: Drive) -> list[cmd.ScaleUp]:
    """The starts of all ranks. Other starts replace the ranks that the actor lost."""
    return [command for command in ups_of(drive, Role.ACTOR) if command.grants == command.members]


def test_a_rollout_engine_that_dies_leaves_the_others_at_work_and_comes_back_under_a_newer_token() -> None:
    drive = iterating()
    drive.cluster.kill_worker(ROLLOUT_GPU)
    drive.step()

    remaining = drive.state.components[Role.ROLLOUT]
    assert [grant.gpu for grant in remaining.grants] == [gpu("n0", 1), gpu("n1", 1)]
    assert isinstance(remaining.state, Working)
    assert remaining.state.loaded is not None
    assert (drive.state.incarnation, drive.state.phase) == (1, Phase.RUNNING)

    deliver_all(drive)
    first, again = ups_of(drive, Role.ROLLOUT)
    assert len(first.grants) == 3
    assert again.grants == (Grant(ROLLOUT_GPU, Token(1, 2)),)
    assert [grant.gpu for grant in again.members] == [gpu("n0", 1), gpu("n1", 1), ROLLOUT_GPU]
    assert again.weights == drive.state.snapshots[0]
    assert drive.run().phase is Phase.FINISHED


@pytest.mark.parametrize("tp", [1, 2])
def test_a_copy_of_the_inference_that_loses_a_rank_leaves_the_others_at_work_and_comes_back_whole(tp: int) -> None:
    gpus = tuple(gpu("n0", number) for number in (2, 4))[:tp] + tuple(gpu("n1", number) for number in (2, 4))[:tp]
    job = spec()
    placed = Placed(gpus, Layout(tp=tp, dp=2))
    drive = booted(FakeCluster(replace(job, placement={**job.placement, Role.INFERENCE: placed})))
    drive.run_until(is_iterating)
    deliver_all(drive)
    drive.cluster.kill_worker(INFERENCE_GPU)
    drive.step()

    left = drive.state.components[Role.INFERENCE]
    assert [grant.gpu for grant in left.grants] == [*gpus[:tp]]
    assert isinstance(left.state, Working)
    assert left.state.loaded is not None
    assert (drive.state.incarnation, drive.state.phase) == (1, Phase.RUNNING)

    deliver_all(drive)
    drive.run_until(lambda state: len(state.components[Role.INFERENCE].grants) == 2 * tp)
    _, again = ups_of(drive, Role.INFERENCE)
    assert again.grants == tuple(Grant(each, Token(1, 2)) for each in gpus[tp:])
    assert [grant.gpu for grant in again.members] == [*gpus]
    assert (again.weights, again.reference) == (drive.state.snapshots[0], drive.state.reference)
    assert drive.run().phase is Phase.FINISHED
    assert not any(component.num_failed_starts for component in drive.state.components.values())


def test_an_inference_that_loses_its_only_copy_starts_again_in_the_same_incarnation() -> None:
    drive = iterating()
    drive.cluster.kill_worker(INFERENCE_GPU)
    drive.step()

    assert not drive.state.components[Role.INFERENCE].is_up
    assert drive.state.incarnation == 1

    state = drive.run()
    first, again = ups_of(drive, Role.INFERENCE)
    assert [grant.gpu for grant in again.grants] == [grant.gpu for grant in first.grants]
    assert all(new.token > old.token for new, old in zip(again.grants, first.grants, strict=True))
    assert again.reference is not None
    assert (state.phase, state.incarnation) == (Phase.FINISHED, 1)


def test_an_actor_rank_that_dies_in_an_iteration_is_replaced_in_the_same_incarnation() -> None:
    drive = iterating()
    iteration = drive.state.iteration
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.step()

    left = drive.state.components[Role.ACTOR]
    assert isinstance(left.state, Working)
    assert (left.lacks_ranks, [grant.gpu for grant in left.grants]) == (True, [gpu("n0", 0)])
    assert (drive.state.iteration, left.state.num_deaths) == (iteration, 1)

    state = drive.run()
    _, again = ups_of(drive, Role.ACTOR)
    assert again.grants == (Grant(ACTOR_GPU, Token(1, 2)),)
    assert [grant.gpu for grant in again.members] == [gpu("n0", 0), ACTOR_GPU]
    assert (state.phase, state.incarnation, state.num_restarts) == (Phase.FINISHED, 1, 0)
    assert not any(summary.is_superseded for summary in state.summaries)
    assert not any(component.num_failed_starts for component in state.components.values())


@pytest.mark.parametrize(
    "is_known_first", [True, False], ids=["death known before the close", "death known after the close"]
)
def test_an_iteration_closed_by_an_actor_that_lacks_a_rank_is_saved_and_published_once_the_rank_is_back(
    is_known_first: bool,
) -> None:
    drive = iterating()
    drive.cluster.work()
    drive.cluster.kill_worker(ACTOR_GPU)
    death = drive.cluster.outbox.pop()
    if is_known_first:
        drive.deliver(death)
    drive.run_until(lambda _: bool(_closes_of_actor(drive)))
    assert drive.cluster.checkpoints == {}
    if not is_known_first:
        drive.deliver(death)

    drive.run_until(lambda state: state.next_iteration == 1 and is_iterating(state))

    assert list(drive.cluster.checkpoints) == ["inc001-it000001"]
    assert len(_closes_of_actor(drive)) == 1
    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


def _closes_of_actor(drive: Drive) -> list[cmd.CloseIteration]:
    closes = [command for command in drive.cluster.log if isinstance(command, cmd.CloseIteration)]
    return [command for command in closes if command.header.role is Role.ACTOR]


def test_an_actor_rank_that_dies_between_two_iterations_is_replaced_in_the_same_incarnation() -> None:
    drive = iterating()
    drive.run_until(lambda state: state.next_iteration == 1 and state.iteration is None)
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.deliver(drive.cluster.outbox.pop())
    assert drive.state.components[Role.ACTOR].lacks_ranks

    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


def test_an_actor_rank_that_dies_before_the_first_iteration_opens_costs_the_incarnation() -> None:
    drive = booted(FakeCluster(spec()))
    drive.run_until(lambda state: state.components[Role.ACTOR].is_up)
    assert drive.state.phase is Phase.STARTING
    drive.cluster.kill_worker(ACTOR_GPU)

    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 2)


def kill_and_replace(drive: Drive) -> None:
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.step()
    drive.run_until(lambda state: not state.components[Role.ACTOR].lacks_ranks)


def test_an_iteration_outlives_max_deaths_of_actor_ranks_and_no_more() -> None:
    drive = iterating()
    for _ in range(MAX_DEATHS):
        kill_and_replace(drive)
    assert drive.state.incarnation == 1

    drive.cluster.kill_worker(ACTOR_GPU)
    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 2)


def test_every_iteration_outlives_max_deaths_of_actor_ranks() -> None:
    drive = iterating()
    for iteration in range(2):
        drive.run_until(lambda state, iteration=iteration: is_iterating(state) and state.next_iteration == iteration)  # type: ignore[misc]
        deliver_all(drive)
        for _ in range(MAX_DEATHS):
            kill_and_replace(drive)

    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


def test_a_rank_that_dies_each_time_it_is_brought_back_costs_the_incarnation_in_the_end() -> None:
    drive = iterating()
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.step()
    num_tries = 0
    while drive.state.incarnation == 1:
        drive.run_until(lambda state: state.resize() is not None or state.incarnation == 2)
        if drive.state.resize() is not None:
            num_tries += 1
            drive.cluster.gates[ACTOR_GPU].highest = drive.cluster.store.gpus[ACTOR_GPU].token
            drive.run_until(lambda state: state.resize() is None)

    assert num_tries == MAX_DEATHS
    assert drive.run().phase is Phase.FINISHED


def test_the_node_of_a_dead_rank_that_is_lost_as_well_costs_the_incarnation() -> None:
    drive = iterating()
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.step()
    assert drive.state.incarnation == 1

    drive.cluster.kill_instance(instance_id(Role.ACTOR, NODES[1]), tells=True)
    drive.run_until(lambda state: state.incarnation == 2)

    assert drive.run().phase is Phase.FINISHED


def test_an_actor_rank_whose_state_is_lost_starts_a_new_incarnation_from_the_last_checkpoint() -> None:
    drive = booted(FakeCluster(spec(num_iterations=3), keeps_state=False))
    drive.run_until(lambda state: is_iterating(state) and state.next_iteration == 1)
    drive.cluster.kill_worker(ACTOR_GPU)

    state = drive.run()

    assert [command.checkpoint for command in starts_of_actor(drive)] == ["", "inc001-it000001"]
    assert (state.phase, state.incarnation, state.num_restarts) == (Phase.FINISHED, 2, 1)
    assert [(each.iteration, each.incarnation) for each in state.summaries if not each.is_superseded] == [
        (0, 1),
        (1, 2),
        (2, 2),
    ]


def test_iterations_after_the_last_checkpoint_are_superseded_and_their_samples_discarded_with_the_reason() -> None:
    drive = booted(FakeCluster(spec(num_iterations=3), checkpoint_every=3, keeps_state=False))
    drive.run_until(lambda state: is_iterating(state) and state.next_iteration == 2)
    drive.cluster.kill_worker(ACTOR_GPU)

    state = drive.run()

    assert [command.checkpoint for command in starts_of_actor(drive)] == ["", ""]
    redone = [each for each in state.summaries if each.is_superseded]
    assert [each.iteration for each in redone] == [0, 1, 2]
    for summary in redone[:2]:
        assert summary.trained.num_samples == 0
        reasons = {fate.reason: fate.num_samples for fate in summary.discarded}
        assert reasons == {"incarnation_superseded": 5, "invalid": 1}
        assert summary.generated.num_samples == total((*summary.filtered, *summary.discarded)).num_samples


def test_an_iteration_that_breaks_off_counts_the_samples_of_the_rollouts_last_progress() -> None:
    drive = iterating(keeps_state=False)
    name = instance_id(Role.ROLLOUT, NODES[0])
    drive.cluster.voice.say(name, ev.Progress((), 3, 4, "generate"), incarnation=1, iteration=0)
    deliver_all(drive)
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.run_until(lambda state: state.incarnation == 2)

    (summary,) = drive.state.summaries
    assert summary.is_superseded
    assert summary.generated.num_samples == 6, "3 prompts, 2 samples each"
    assert [(fate.reason, fate.num_samples) for fate in summary.discarded] == [("incarnation_superseded", 6)]


def test_an_actor_that_dies_more_often_than_allowed_fails_the_job_with_the_numbers() -> None:
    drive = iterating(max_actor_restarts=1, keeps_state=False)
    for _ in range(2):
        drive.run_until(is_iterating)
        drive.cluster.kill_worker(ACTOR_GPU)
        drive.run_until(lambda state: state.iteration is None or state.phase is Phase.STOPPING)

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert "what a dead rank held is gone" in state.message
    assert "the actor was restarted 1 times and runtime.max_actor_restarts=1" in state.message
    assert not any(gate.is_held for gate in drive.cluster.gates.values())


def test_an_actor_that_restarts_in_a_paused_job_leaves_it_paused_with_what_a_person_has_to_do() -> None:
    drive = iterating()
    drive.cluster.voice.say("actor", ev.DeadLettered("samples.tide", "not a group", 7))
    drive.run_until(lambda state: state.phase is Phase.PAUSED)
    want = drive.state.message
    drive.cluster.kill_worker(ACTOR_GPU)
    drive.run_until(lambda state: state.incarnation == 2)

    assert (drive.state.phase, drive.state.message) == (Phase.PAUSED, want)

    drive.cluster.voice.say("control", ev.JobResumeRequested())
    assert drive.run().phase is Phase.FINISHED
