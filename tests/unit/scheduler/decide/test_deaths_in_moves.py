"""Deaths while GPUs move, or while the actor is suspended: what they cost, and what goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import Phase
from services.scheduler.state.values import Placed
from tests.unit.scheduler.decide.moving_bench import (
    ACTOR,
    HOME,
    INFERENCE,
    ROLLOUT,
    deliver_all,
    engines,
    finishes,
    gpus_of,
    propose,
    ready,
    running,
    settle,
)
from tests.unit.scheduler.drive import Drive
from tests.unit.scheduler.fake_parts import NODES, gpu, spec
from tidegate.ownership.records import GpuState, Outcome
from tidegate.types import GpuId, Layout, NodeId, Role, Token, instance_id


def test_an_engine_of_several_gpus_dies_whole_and_its_other_gpus_are_taken_back() -> None:
    job = replace(spec(), placement={**HOME, Role.ROLLOUT: Placed((*ROLLOUT, gpu("n0", 3)), Layout(tp=2, dp=2))})
    drive, proposed = running(job)
    drive.cluster.kill_worker(ROLLOUT[0])
    drive.deliver(drive.cluster.outbox.pop())
    assert gpus_of(drive.state, Role.ROLLOUT) == (ROLLOUT[2], gpu("n0", 3))

    deliver_all(drive)
    drive.run_until(lambda state: len(state.components[Role.ROLLOUT].grants) == 4)

    tokens = {grant.gpu: grant.token for grant in drive.state.components[Role.ROLLOUT].grants}
    assert (tokens[ROLLOUT[0]], tokens[ROLLOUT[1]]) == (Token(1, 2), Token(1, 2))
    finishes(drive, proposed)


def kill(drive: Drive, slot: GpuId) -> None:
    drive.cluster.kill_worker(slot)
    drive.deliver(drive.cluster.outbox.pop())


@pytest.mark.parametrize("slot", [ROLLOUT[0], ROLLOUT[1]], ids=["it stays", "it leaves"])
def test_an_engine_that_dies_as_others_leave_changes_nothing_for_the_rest(slot: GpuId) -> None:
    drive, proposed = running()
    ready(drive, proposed, rollout=engines(ROLLOUT[0], ROLLOUT[2]))
    kill(drive, slot)
    settle(drive)
    drive.run_until(lambda state: set(gpus_of(state, Role.ROLLOUT)) == {ROLLOUT[0], ROLLOUT[2]})
    assert drive.cluster.store.gpus[ROLLOUT[1]].state is GpuState.FREE
    finishes(drive, proposed)


def test_the_last_engine_that_stays_dies_as_the_others_leave() -> None:
    drive, proposed = running()
    ready(drive, proposed, rollout=engines(ROLLOUT[0]))
    kill(drive, ROLLOUT[0])
    settle(drive)
    drive.run_until(lambda state: gpus_of(state, Role.ROLLOUT) == (ROLLOUT[0],))
    finishes(drive, proposed)


@pytest.mark.parametrize(
    ("slot", "want"),
    [(INFERENCE[0], Outcome.ABORTED), (ROLLOUT[1], Outcome.COMMITTED)],
    ids=["the only copy that stays", "the copy that leaves"],
)
def test_a_copy_that_dies_as_the_inference_shrinks_ends_the_change_only_where_none_is_left(
    slot: GpuId, want: Outcome
) -> None:
    drive, proposed = running()
    large = Placed((*INFERENCE, *ROLLOUT[1:]), Layout(tp=2, dp=2))
    propose(drive, proposed, rollout=engines(ROLLOUT[0]), inference=large)
    ready(drive, proposed)
    transition = drive.state.changing(Role.INFERENCE)
    assert transition is not None
    kill(drive, slot)
    drive.run_until(lambda _: drive.cluster.store.records[transition.id].outcome is not Outcome.OPEN)
    assert drive.cluster.store.records[transition.id].outcome is want
    settle(drive)
    drive.run_until(lambda state: all(state.components[role].layout == HOME[role].layout for role in Role))
    assert set(gpus_of(drive.state, Role.ROLLOUT)) == set(ROLLOUT)
    finishes(drive, proposed)


@pytest.mark.parametrize("is_late", [False, True], ids=["reported before", "reported after"])
def test_a_rank_that_dies_as_the_actor_is_suspended_costs_no_incarnation(is_late: bool) -> None:
    drive, proposed = running()
    ready(drive, proposed, actor=None, rollout=engines(*ROLLOUT, *ACTOR))
    drive.cluster.kill_worker(ACTOR[1])
    death = drive.cluster.outbox.pop()
    if not is_late:
        drive.deliver(death)
    settle(drive)
    if is_late:
        drive.deliver(death)
    drive.run_until(lambda state: set(gpus_of(state, Role.ROLLOUT)) == {*ROLLOUT, *ACTOR})
    assert drive.state.components[Role.ACTOR].is_suspended
    finishes(drive, proposed)


def test_an_actor_that_lacks_a_rank_is_suspended_as_it_is_and_resumed_whole() -> None:
    drive, proposed = running()
    proposed.placement = {Role.ACTOR: None}
    kill(drive, ACTOR[1])
    settle(drive)
    assert drive.state.components[Role.ACTOR].is_suspended
    drive.run_until(lambda state: not state.suspects(Role.ACTOR))
    state = propose(drive, proposed)
    assert gpus_of(state, Role.ACTOR) == ACTOR
    finishes(drive, proposed)


def test_a_worker_that_dies_as_it_comes_to_a_suspended_actor_is_replaced() -> None:
    drive, proposed = running()
    propose(drive, proposed, actor=None)
    drive.cluster.hung.add(Role.ACTOR)
    ready(drive, proposed)
    gate = drive.cluster.gates[ACTOR[0]]
    gate.highest, gate.is_held = drive.cluster.store.gpus[ACTOR[0]].token, True
    kill(drive, ACTOR[0])
    drive.cluster.hung.clear()
    drive.run_until(lambda state: gpus_of(state, Role.ACTOR) == ACTOR)
    finishes(drive, proposed)


LOST_STATES = {
    "a node whose memory has it is lost": lambda drive: drive.cluster.kill_instance(
        instance_id(Role.ACTOR, NODES[1]), tells=True
    ),
    "its lead changes": lambda drive: drive.cluster.elect(instance_id(Role.ACTOR, NODES[1])),
    "its lead says so": lambda drive: drive.cluster.voice.say(
        instance_id(Role.ACTOR, NODES[0]),
        ev.Failed(ev.FailedWhat.COMPONENT, (), 0, "what was kept is gone", fatal=False),
        incarnation=1,
    ),
}


@pytest.mark.parametrize("case", LOST_STATES)
def test_a_suspended_actor_whose_state_is_lost_costs_the_incarnation(case: str) -> None:
    drive, proposed = running()
    propose(drive, proposed, actor=None, rollout=engines(*ROLLOUT, *ACTOR))
    LOST_STATES[case](drive)
    deliver_all(drive)
    assert drive.state.incarnation == 2, "it is not waited for until somebody resumes it"
    proposed.placement, proposed.trains = {}, True

    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 2)


def test_an_actor_that_has_resumed_as_its_transition_is_aborted_goes_on_from_the_checkpoint() -> None:
    drive, proposed = running()
    # The state is on the first node alone.
    propose(drive, proposed, actor=Placed(ACTOR[:1], Layout()))
    propose(drive, proposed, actor=None)
    proposed.placement = {}
    drive.decide()
    resumption = drive.state.transition_of(Role.ACTOR)
    assert resumption is not None
    # The lead has resumed, and the lease of the other node ends before anybody hears of it.
    told = [event for event in drive.cluster.outbox if event.transition_id == resumption.id]
    assert any(isinstance(event.body, ev.LayoutCommitted) for event in told)
    for event in told:
        drive.cluster.outbox.remove(event)
    drive.cluster.lapse(instance_id(Role.ACTOR, NODES[1]))
    deliver_all(drive)
    for event in told:
        drive.deliver(event)
    proposed.trains = True

    state = drive.run()

    assert drive.cluster.store.records[resumption.id].outcome is Outcome.ABORTED
    assert (state.phase, state.incarnation) == (Phase.FINISHED, 2)


def test_an_actor_that_cannot_be_resumed_costs_the_incarnation_in_the_end() -> None:
    drive, proposed = running()
    propose(drive, proposed, actor=None)
    node = instance_id(Role.ACTOR, NodeId("n1"))
    drive.cluster.instances[node].is_alive = False
    proposed.placement = {}
    drive.cluster.has_supervisor = False
    drive.run_until(lambda state: state.incarnation == 2)
    assert "the actor failed to resume 4 times in a row" in drive.state.message


def test_a_rollout_that_keeps_no_engine_is_started_anew() -> None:
    drive, proposed = running()
    drive.cluster.hung.add(Role.ROLLOUT)
    ready(drive, proposed, rollout=engines(ROLLOUT[0]))
    drive.cluster.hung.clear()
    kill(drive, ROLLOUT[0])
    downs = [command for command in drive.cluster.log if isinstance(command, cmd.ScaleDown)]
    assert all(down.members for down in downs), "no lead has to give up all"
    drive.run_until(lambda state: gpus_of(state, Role.ROLLOUT) == (ROLLOUT[0],))
    finishes(drive, proposed)


@pytest.mark.parametrize("place", [engines(ROLLOUT[0]), None], ids=["some leave", "all leave"])
def test_a_lost_node_of_engines_that_leave_keeps_no_change_open(place: Placed | None) -> None:
    home = {**HOME, Role.ACTOR: Placed((ACTOR[0],), Layout()), Role.INFERENCE: Placed((INFERENCE[0],), Layout())}
    drive, proposed = running(replace(spec(), placement=home))
    drive.cluster.has_supervisor = False
    drive.cluster.hung.add(Role.ROLLOUT)
    ready(drive, proposed, rollout=place)
    transition = drive.state.changing(Role.ROLLOUT)
    assert transition is not None
    for role in Role:
        drive.cluster.kill_instance(instance_id(role, NODES[1]), tells=True)
    drive.cluster.hung.clear()
    drive.cluster.move_lead(Role.ROLLOUT)
    deliver_all(drive)
    settle(drive)

    assert not drive.cluster.store.records[transition.id].is_open
    assert {drive.cluster.store.gpus[slot].state for slot in ROLLOUT[1:]} == {GpuState.LOST}
    assert drive.cluster.store.gpus[ACTOR[0]].state is GpuState.OWNED
    drive.cluster.has_supervisor = True
    finishes(drive, proposed)
