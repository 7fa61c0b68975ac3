"""How GPUs of dead holders come back: through their gates, under newer tokens."""

from __future__ import annotations

import pytest

from services.scheduler.decide.turn import checked
from services.scheduler.evolve.fold import evolve
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import Phase
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, NODES, gpu, spec
from tests.unit.scheduler.lost_store import lose_store
from tests.unit.scheduler.open_iteration import is_iterating, iterating
from tidegate.ownership.records import GpuRecord, GpuState
from tidegate.types import GpuId, Grant, NodeId, Role, Token, instance_id

ROLLOUT_GPU = gpu("n1", 3)
MINUTE_MS = 60_000


def test_a_lost_gpu_is_not_taken_back_while_its_gate_says_that_a_worker_holds_it() -> None:
    drive = iterating()
    name = instance_id(Role.ROLLOUT, NODES[1])
    drive.cluster.voice.say("scheduler", ev.InstanceLost(name, 1))
    drive.step()

    lost = [each.gpu for each in drive.state.gpus.values() if each.state is GpuState.LOST]
    assert lost == [gpu("n1", 1), gpu("n1", 3)]
    assert all(drive.cluster.gates[each].is_held for each in lost)

    drive.cluster.voice.say(name, ev.InstanceJoined(name, f"at-{name}", 1))
    state = drive.run()

    cleared = [
        command.grants
        for command in drive.cluster.log
        if isinstance(command, cmd.ScaleDown) and not command.header.transition_id
    ]
    assert sorted(grants[0].gpu for grants in cleared) == lost
    assert state.phase is Phase.FINISHED


def _cleared(drive: Drive) -> list[GpuId]:
    downs = [each for each in drive.cluster.log if isinstance(each, cmd.ScaleDown) and not each.header.transition_id]
    return [grant.gpu for each in downs for grant in each.grants]


def test_a_held_gpu_is_cleared_once_an_instance_of_its_holder_lives_on_its_node() -> None:
    drive = iterating()
    name = instance_id(Role.ROLLOUT, NODES[1])
    drive.cluster.voice.say("scheduler", ev.InstanceLost(name, 1))
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))
    assert {grant.gpu for grant in drive.state.held} == {gpu("n1", 1), gpu("n1", 3)}
    assert _cleared(drive) == [], "the lead does not know the instance that it would ask"
    assert "whose instance on n1 is not known to live" in drive.last_reason

    drive.cluster.voice.say(name, ev.InstanceJoined(name, f"at-{name}", 1))
    state = drive.run()

    assert sorted(_cleared(drive)) == [gpu("n1", 1), gpu("n1", 3)]
    assert (state.phase, state.incarnation) == (Phase.FINISHED, 1)


def test_a_worker_that_does_not_leave_when_its_lead_clears_it_fails_the_job_after_five_minutes() -> None:
    drive = iterating(deadline_ms=60 * MINUTE_MS)
    name = instance_id(Role.ROLLOUT, NODES[1])
    drive.cluster.voice.say("scheduler", ev.InstanceLost(name, 1))
    drive.cluster.voice.say(name, ev.InstanceJoined(name, f"at-{name}", 1))
    drive.cluster.hung = {Role.ROLLOUT}
    start_ms = drive.now_ms

    state = drive.run_until(lambda state: state.phase is Phase.STOPPING)

    assert _cleared(drive) != []
    assert "the gate of n1/1, which a worker still holds, was asked 16 times without effect" in state.message
    assert 5 * MINUTE_MS < drive.now_ms - start_ms < 6 * MINUTE_MS


def test_a_gate_that_was_asked_for_an_hour_has_its_five_minutes_when_its_gpu_comes_to_be_needed() -> None:
    drive = iterating()
    name = instance_id(Role.ROLLOUT, NODES[1])
    drive.cluster.has_supervisor = False
    drive.cluster.voice.say("scheduler", ev.InstanceLost(name, 1))
    drive.cluster.hung = set(Role)
    hour_ms = drive.now_ms + 60 * MINUTE_MS
    while drive.now_ms < hour_ms:
        assert drive.step(), drive.last_reason
    assert drive.state.phase is Phase.RUNNING, drive.state.message

    drive.cluster.kill_worker(gpu("n0", 1))
    start_ms = drive.now_ms
    state = drive.run_until(lambda state: state.phase is Phase.STOPPING)

    assert 4 * MINUTE_MS < drive.now_ms - start_ms < 6 * MINUTE_MS, state.message


def test_a_gpu_whose_last_owner_the_store_has_lost_is_cleared_by_the_component_that_holds_it() -> None:
    drive = iterating()
    gate = drive.cluster.gates[ROLLOUT_GPU]
    # As after a move: the actor has the GPU, and the store that knew it comes back empty.
    gate.holder = Role.ACTOR
    held_under = gate.highest
    lose_store(drive, None)

    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 2)
    asked = {
        each.header.role for each in drive.cluster.log if isinstance(each, cmd.ScaleDown) and _names(each, held_under)
    }
    assert Role.ACTOR in asked
    refused = [event for event in drive.delivered if isinstance(event.body, ev.Failed)]
    assert refused == [], "nobody starts on a GPU that a worker holds"


def _names(down: cmd.ScaleDown, token: Token) -> bool:
    return Grant(ROLLOUT_GPU, token) in down.grants


def test_a_gates_answer_about_an_earlier_grant_says_nothing_of_the_present_one() -> None:
    drive = iterating()
    earlier = Grant(ROLLOUT_GPU, Token(1, 0))
    drive.cluster.kill_worker(ROLLOUT_GPU)
    event = drive.cluster.outbox.pop()
    state = evolve(drive.state, event)
    gate = ev.GateReported(NODES[1], (ev.GateState(ROLLOUT_GPU, Token(1, 0), held=False),))

    late = ev.Event(job=JOB, source="scheduler", boot=1, sequence=99, body=gate, grants=(earlier,))
    answer = ev.Event(
        job=JOB, source="scheduler", boot=1, sequence=99, body=gate, grants=(Grant(ROLLOUT_GPU, Token(1, 1)),)
    )

    assert evolve(state, late).released == ()
    assert evolve(state, answer).released == (Grant(ROLLOUT_GPU, Token(1, 1)),)


def test_a_lost_gpu_that_no_worker_ever_held_is_free_though_its_gate_does_not_list_it() -> None:
    drive = iterating()
    drive.cluster.kill_worker(ROLLOUT_GPU)
    grant = Grant(ROLLOUT_GPU, Token(1, 1))
    state = evolve(drive.state, drive.cluster.outbox.pop())

    def answer(node: NodeId) -> ev.Event:
        gate = ev.GateReported(node, ())
        return ev.Event(job=JOB, source="scheduler", boot=1, sequence=99, body=gate, grants=(grant,))

    assert evolve(state, answer(NODES[0])).released == ()
    assert evolve(state, answer(NODES[1])).released == (grant,)


def test_a_grant_that_the_store_lost_and_nobody_has_leaves_the_gpu_as_the_store_has_it() -> None:
    drive = iterating()
    drive.cluster.kill_worker(ROLLOUT_GPU)
    state = evolve(drive.state, drive.cluster.outbox.pop())

    def told(body: ev.Body, *grants: Grant) -> ev.Event:
        return ev.Event(job=JOB, source="scheduler", boot=1, sequence=99, body=body, grants=grants)

    free = GpuRecord(ROLLOUT_GPU, GpuState.FREE, None, Token(1, 0))
    observed = told(ev.OwnershipObserved((free,), tuple(drive.cluster.store.records.values())))
    assert evolve(state, observed).gpus[ROLLOUT_GPU].token == Token(1, 1), "a worker may still have it"

    nobody = told(ev.GateReported(NODES[1], ()), Grant(ROLLOUT_GPU, Token(1, 1)))
    assert checked(evolve(state, nobody), evolve(evolve(state, nobody), observed)).gpus[ROLLOUT_GPU] == free


@pytest.mark.parametrize("is_held", [True, False])
def test_a_lost_gpu_whose_last_owner_nobody_knows_is_taken_back_through_its_gate(is_held: bool) -> None:
    cluster = FakeCluster(spec())
    lost = GpuRecord(ROLLOUT_GPU, GpuState.LOST, None, Token(1, 7))
    cluster.store.gpus[ROLLOUT_GPU] = lost
    cluster.gates[ROLLOUT_GPU].highest, cluster.gates[ROLLOUT_GPU].is_held = lost.token, is_held
    drive = booted(cluster)

    drive.run_until(is_iterating)

    assert Grant(ROLLOUT_GPU, Token(1, 8)) in drive.state.components[Role.ROLLOUT].grants
    assert drive.run().phase is Phase.FINISHED
