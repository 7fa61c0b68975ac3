"""What a person asks by hand and what the job does for it: splits, migrations, drained GPUs, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.scheduler.decide.homes import home_of
from services.scheduler.decide.proposals import proposal_of
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.manual_moves import open_places
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Absence
from services.scheduler.state.homes import home_spec
from services.scheduler.state.values import Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tests.unit.scheduler.manual_job import (
    ACTOR,
    FEWER_ENGINES,
    HOME,
    INFERENCE,
    LARGER,
    MOVED_ENGINE,
    ROLLOUT,
    SMALLER,
    SPARE,
    at_work,
    drain,
    gpus_of,
    is_at,
    planned,
    running,
    say,
    split,
)
from tidegate.ownership.records import GpuState
from tidegate.types import Layout, Role


@pytest.mark.parametrize("placement", [LARGER, SMALLER, FEWER_ENGINES, MOVED_ENGINE], ids=str)
def test_each_component_gets_what_a_split_gives_it_and_the_job_ends_in_that_split(
    placement: dict[Role, Placed],
) -> None:
    drive = running()
    split(drive, placement)
    state = drive.run_until(is_at(placement))
    assert (state.incarnation, state.components[ACTOR].layout) == (1, placement[ACTOR].layout)
    assert home_spec(state, drive.cluster.job_spec).placement == placement
    assert (state.asked, state.manual.split) == (None, {})
    assert open_places(state) == ()
    assert drive.run().phase is Phase.FINISHED


def test_a_place_is_open_until_the_component_is_there_also_in_the_configs_split_and_after_its_iteration() -> None:
    drive = running(num_iterations=3)
    split(drive, FEWER_ENGINES)
    drive.run_until(is_at(FEWER_ENGINES))
    split(drive, dict(HOME))
    assert drive.state.manual.split == {}
    for _ in range(200):
        if is_at(dict(HOME))(drive.state):
            break
        want = ((ROLLOUT, HOME[ROLLOUT]),)
        assert open_places(drive.state) == want
        assert open_places(replace(drive.state, iteration=None, next_iteration=1)) == want
        drive.step()
    assert is_at(dict(HOME))(drive.state)
    assert open_places(drive.state) == ()


def test_a_place_that_lost_a_gpu_to_a_drain_is_not_open() -> None:
    drive = running()
    split(drive, MOVED_ENGINE)
    drain(drive, SPARE)
    assert open_places(drive.state) == ()


def test_gpus_are_given_up_before_another_component_claims_them() -> None:
    drive = running()
    sent = len(drive.cluster.log)
    split(drive, LARGER)
    drive.run_until(is_at(LARGER))
    assert planned(drive, sent) == [
        (ROLLOUT, {gpu("n1", 3)}, set()),
        (ACTOR, set(), {gpu("n1", 3), SPARE}),
    ]


def test_a_split_that_the_job_is_in_moves_nothing() -> None:
    drive = running()
    sent = len(drive.cluster.log)
    split(drive, dict(HOME))
    assert planned(drive, sent) == []
    assert drive.state.manual.split == {}
    assert home_spec(drive.state, drive.cluster.job_spec).placement == HOME


def test_a_split_whose_actor_cannot_get_there_is_undone() -> None:
    drive = running()
    split(drive, LARGER)
    drive.run_until(lambda state: len(at_work(state)[ROLLOUT]) == 2)
    drive.cluster.num_failing_resizes = 1
    drive.run_until(lambda state: state.asked is None)
    assert at_work(drive.state)[ACTOR] == set(HOME[ACTOR].gpus)
    state = drive.run_until(is_at(dict(HOME)))
    assert (state.manual.split, state.manual.homes, state.moved) == ({}, {}, None)
    assert drive.run().phase is Phase.FINISHED


def test_a_later_request_replaces_a_split_that_is_not_in_force() -> None:
    drive = running()
    split(drive, LARGER)
    split(drive, FEWER_ENGINES)
    drive.run_until(is_at(FEWER_ENGINES))
    assert drive.run().phase is Phase.FINISHED


def test_a_request_during_a_resize_of_the_actor_comes_after_it() -> None:
    drive = running()
    say(drive, ev.ResizeRequested(Placed((gpu("n0", 0), gpu("n1", 0)), Layout(tp=2))))
    assert drive.state.resize() is not None
    split(drive, LARGER)
    assert drive.state.asked_next == LARGER[ACTOR]
    drive.run_until(is_at(LARGER))
    assert drive.run().phase is Phase.FINISHED


def test_a_resize_of_the_actor_alone_replaces_a_split() -> None:
    drive = running()
    split(drive, LARGER)
    say(drive, ev.ResizeRequested(HOME[ACTOR]))
    drive.run_until(is_at(dict(HOME)))
    assert drive.state.manual.split == {}


def until_its_resize_is_under_way(drive: Drive) -> ClusterState:
    return drive.run_until(lambda state: state.resize() is not None)


def another_split(drive: Drive) -> None:
    split(drive, FEWER_ENGINES)


def a_failing_split(drive: Drive) -> None:
    split(drive, MOVED_ENGINE)
    drive.cluster.num_failing_resizes = 1


def an_actor_at_home(drive: Drive) -> None:
    say(drive, ev.ResizeRequested(HOME[ACTOR]))


def a_drain(drive: Drive) -> None:
    drain(drive, gpu("n0", 1))


def a_lost_gpu(drive: Drive) -> None:
    drive.cluster.kill_worker(gpu("n0", 1))


def nothing(drive: Drive) -> None:
    """Only the actor dies."""


@pytest.mark.parametrize("placement", [LARGER, SMALLER], ids=["larger", "smaller"])
@pytest.mark.parametrize("meanwhile", [nothing, a_drain, a_lost_gpu, another_split, a_failing_split, an_actor_at_home])
@pytest.mark.parametrize(
    "num_steps", [pytest.param(number, marks=() if number % 3 == 0 else pytest.mark.long) for number in range(12)]
)
def test_homes_share_no_gpu_whatever_fails_on_the_way(
    placement: dict[Role, Placed], meanwhile: Callable[[Drive], None], num_steps: int
) -> None:
    drive = running(max_actor_restarts=9)
    split(drive, placement)
    for _ in range(num_steps):
        drive.step()
    meanwhile(drive)
    for slot in HOME[ACTOR].gpus if meanwhile is nothing else ():
        drive.cluster.kill_worker(slot)
    for num_done in range(400):
        homes = [
            slot for placed in home_spec(drive.state, drive.cluster.job_spec).placement.values() for slot in placed.gpus
        ]
        assert len(homes) == len(set(homes))
        if num_done == 30:
            # All homes have to be free for a job that starts again.
            for slot in at_work(drive.state)[ACTOR]:
                drive.cluster.kill_worker(slot)
        if not drive.step():
            break
    assert drive.run().phase is Phase.FINISHED


def test_a_split_whose_resize_commits_is_in_force_whole_though_a_drain_took_its_place() -> None:
    drive = running(max_actor_restarts=9)
    split(drive, LARGER)
    until_its_resize_is_under_way(drive)
    drain(drive, gpu("n0", 1))
    assert (drive.state.asked, drive.state.manual.split) == (None, {})
    state = drive.run_until(lambda state: state.moved is not None)
    assert home_spec(state, drive.cluster.job_spec).placement == LARGER
    for slot in LARGER[ACTOR].gpus:
        drive.cluster.kill_worker(slot)
    drive.run_until(lambda state: state.incarnation == 2 and at_work(state)[ACTOR] == set(LARGER[ACTOR].gpus))
    assert drive.run().phase is Phase.FINISHED


def test_a_split_whose_resize_commits_is_in_force_whole_though_the_next_split_fails() -> None:
    drive = running()
    split(drive, LARGER)
    until_its_resize_is_under_way(drive)
    split(drive, SMALLER)
    drive.run_until(lambda state: state.moved is not None)
    assert home_spec(drive.state, drive.cluster.job_spec).placement == LARGER
    assert drive.state.manual.split == SMALLER
    drive.cluster.num_failing_resizes = 1
    state = drive.run_until(lambda state: not state.manual.split)
    assert home_spec(state, drive.cluster.job_spec).placement == LARGER
    drive.run_until(is_at(LARGER))
    assert drive.run().phase is Phase.FINISHED


def test_a_request_for_gpus_that_a_split_has_given_to_others_meanwhile_is_dropped() -> None:
    drive = running()
    split(drive, SMALLER)
    until_its_resize_is_under_way(drive)
    say(drive, ev.ResizeRequested(HOME[ACTOR]))
    assert drive.state.asked_next == HOME[ACTOR]
    state = drive.run_until(is_at(SMALLER))
    assert (state.asked, state.asked_next) == (None, None)
    assert drive.run().phase is Phase.FINISHED


def test_a_wish_for_a_gpu_that_is_gone_is_dropped() -> None:
    drive = running()
    split(drive, LARGER)
    token = drive.state.gpus[SPARE].token
    absent = replace(drive.state, absent={SPARE: Absence(token, 1, is_long=True)})
    # `still` keeps only absences that last, so the store must have lost the GPU too.
    lost = {**absent.gpus, SPARE: replace(absent.gpus[SPARE], state=GpuState.LOST)}
    remembered = replace(absent.remembered, assignment=None)
    state = replace(absent, gpus=lost, remembered=remembered)
    assert state.asked == LARGER[ACTOR]
    after = evolve(state, ev.Event(JOB, "control", 1, 900, ev.DrainRequested((SPARE,), is_undone=False)))
    assert (after.asked, after.manual.split) == (None, {})


def test_a_drained_gpu_is_given_back_and_nobody_gets_it_until_it_is_undone() -> None:
    drive = running(num_iterations=4)
    engine = gpu("n1", 1)
    drain(drive, engine)
    state = drive.run_until(lambda state: state.gpus[engine].state is GpuState.FREE and not state.transitions)
    assert at_work(state) == {**gpus_of(dict(HOME)), ROLLOUT: {gpu("n0", 1), gpu("n1", 3)}}
    drive.run_until(lambda state: state.next_iteration == 1 and state.iteration is not None)
    assert drive.state.gpus[engine].state is GpuState.FREE
    assert "drained by hand: n1/1" in drive.last_reason
    drain(drive, engine, undo=True)
    drive.run_until(is_at(dict(HOME)))
    assert drive.run().phase is Phase.FINISHED


def test_a_drained_gpu_of_the_actor_shrinks_it_by_a_copy() -> None:
    drive = running()
    drain(drive, gpu("n1", 0))
    state = drive.run_until(lambda state: at_work(state)[ACTOR] == {gpu("n0", 0)} and not state.transitions)
    assert state.components[ACTOR].layout == Layout()
    assert drive.run().phase is Phase.FINISHED


def test_a_component_all_of_whose_gpus_are_drained_gets_others() -> None:
    drive = running()
    drain(drive, *HOME[INFERENCE].gpus)
    state = drive.run_until(
        lambda state: (
            len(at_work(state)[INFERENCE]) == 2
            and at_work(state)[INFERENCE].isdisjoint(HOME[INFERENCE].gpus)
            and not state.transitions
        )
    )
    assert len(set.union(*at_work(state).values())) == sum(map(len, at_work(state).values()))
    assert drive.run().phase is Phase.FINISHED


def test_a_worker_that_dies_on_a_drained_gpu_is_not_started_again_there() -> None:
    drive = running()
    engine = gpu("n1", 1)
    drain(drive, engine)
    drive.cluster.kill_worker(engine)
    state = drive.run_until(
        lambda state: state.gpus[engine].state is GpuState.FREE and engine not in at_work(state)[ROLLOUT]
    )
    assert drive.run().phase is Phase.FINISHED
    assert state.gpus[engine].owner is None


def test_no_home_contains_a_drained_gpu_where_each_component_can_have_a_copy() -> None:
    state = ClusterState(job=JOB, phase=Phase.RUNNING, spec=spec(standby=(SPARE,)))
    assert state.spec is not None
    for drained in state.spec.gpus:
        after = evolve(state, ev.Event(JOB, "control", 1, 1, ev.DrainRequested((drained,), is_undone=False)))
        home = home_of(after, state.spec, StaticPolicy())
        assert drained not in {slot for placed in home.spec.placement.values() for slot in placed.gpus}
        assert drained not in home.spec.standby
    everything = evolve(state, ev.Event(JOB, "control", 1, 1, ev.DrainRequested(state.spec.gpus, is_undone=False)))
    home = home_of(everything, state.spec, StaticPolicy())
    assert home.spec.placement == HOME
    reason = proposal_of(everything, StaticPolicy(), 0).proposal.reason
    assert "and used: a component would have no copy without them" in reason


def test_drained_gpus_stay_drained_over_a_restart_of_the_actor_and_a_resume() -> None:
    drive = running()
    drain(drive, gpu("n1", 1))
    for slot in HOME[ACTOR].gpus:
        drive.cluster.kill_worker(slot)
    state = drive.run_until(lambda state: state.incarnation == 2)
    assert state.manual.drained == (gpu("n1", 1),)
    resumed = evolve(state, ev.Event(JOB, "launcher", 9, 1, ev.JobSubmitted(spec(standby=(SPARE,)), "{}", resume=True)))
    assert resumed.manual.drained == (gpu("n1", 1),)
    assert resumed.manual.homes == {}


def moving() -> Drive:
    """The job under a policy that moves GPUs, as an iteration runs."""
    drive = booted(FakeCluster(spec(standby=(SPARE,), num_iterations=3)))
    drive.policy = DynaRLPolicy(DynaRLRules())
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    drive.cluster.show(ROLLOUT, eighths=2)
    drive.run_until(lambda state: state.remembered.assignment is not None)
    return drive


def test_no_policy_changes_a_split_before_its_iteration_ends() -> None:
    drive = moving()
    split(drive, FEWER_ENGINES)
    state = drive.run_until(is_at(FEWER_ENGINES))
    held = state.manual.held
    assert held == (1, 0)
    assert "placed by hand until iteration 0 ends" in drive.last_reason
    drive.run_until(lambda state: state.next_iteration == 1 and state.iteration is not None)
    drive.cluster.show(ROLLOUT, eighths=2)
    drive.run_until(lambda state: state.remembered.iteration == 1)
    assert drive.run().phase is Phase.FINISHED


def test_no_policy_gets_a_drained_gpu() -> None:
    drive = moving()
    engine = gpu("n1", 1)
    drain(drive, engine)
    drive.run_until(lambda state: state.gpus[engine].state is GpuState.FREE)
    sent = len(drive.cluster.log)
    assert drive.run().phase is Phase.FINISHED
    assert all(engine not in leaves | comes for _, leaves, comes in planned(drive, sent))


@pytest.mark.parametrize(
    "body",
    [
        ev.SplitRequested({**HOME, ROLLOUT: HOME[INFERENCE]}),
        ev.SplitRequested({**HOME, ROLLOUT: Placed((gpu("n9", 9),), Layout())}),
        ev.SplitRequested({ACTOR: HOME[ACTOR]}),
        ev.DrainRequested((gpu("n9", 9),), is_undone=False),
    ],
    ids=["a GPU twice", "another job's GPU", "two components without", "a drain of another job's GPU"],
)
def test_a_request_that_cannot_be_changes_nothing(body: ev.Body) -> None:
    drive = running()
    before = drive.state
    after = evolve(before, ev.Event(JOB, "control", 1, 900, body))
    assert (after.manual, after.asked) == (before.manual, before.asked)
    assert sum(after.ignored.values()) == sum(before.ignored.values()) + 1


def test_a_request_that_comes_again_changes_nothing_more() -> None:
    drive = running()
    drain(drive, gpu("n1", 1))
    state = drive.state
    again = evolve(state, ev.Event(JOB, "control", 1, 901, ev.DrainRequested((gpu("n1", 1),), is_undone=False)))
    assert (again.manual, again.version) == (state.manual, state.version)
