"""The commands of an actor's resize, and the effects of a death or a refusal at each moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.evolve.resizes import fault, is_in_force, open_requests, target
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.values import Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.ownership.records import GpuState, Outcome, PartKind
from tidegate.types import NO_TOKEN, GpuId, Grant, Layout, NodeId, Role, instance_id

FIRST, SECOND = gpu("n0", 0), gpu("n1", 0)
SPARE, OTHER_SPARE, THIRD_SPARE = gpu("n0", 3), gpu("n1", 4), gpu("n0", 4)
LARGER = Placed((FIRST, SECOND, SPARE, OTHER_SPARE), Layout(tp=2, dp=2))
SMALLER = Placed((SECOND,), Layout())
ELSEWHERE = Placed((OTHER_SPARE, SECOND), Layout(dp=2))
OTHERWISE = Placed((FIRST, SECOND), Layout(tp=2))
TURNED = Placed((SECOND, FIRST), Layout(dp=2))


def running(**fields: Any) -> Drive:
    """A job whose first iteration is open and untouched, with all events delivered."""
    cluster = FakeCluster(spec(**{"standby": (SPARE, OTHER_SPARE), **fields}))
    drive = booted(cluster)
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    while cluster.outbox:
        drive.deliver(cluster.outbox.pop(0))
    return drive


def ask(drive: Drive, placed: Placed) -> None:
    drive.cluster.voice.say("control", ev.ResizeRequested(placed))
    drive.deliver(drive.cluster.outbox.pop())


def is_over(state: ClusterState) -> bool:
    return state.asked is None and state.resize() is None


def gpus_of(state: ClusterState) -> tuple[GpuId, ...]:
    return tuple(grant.gpu for grant in state.components[Role.ACTOR].grants)


@pytest.mark.parametrize(
    ("placed", "kind"),
    [
        (LARGER, cmd.ScaleUp),
        (SMALLER, cmd.ScaleDown),
        (ELSEWHERE, cmd.Migrate),
        (OTHERWISE, cmd.Migrate),
        (TURNED, cmd.Migrate),
    ],
    ids=["grow", "shrink", "move", "another layout", "another order"],
)
def test_the_actor_changes_within_an_open_iteration(placed: Placed, kind: type[cmd.LeadCommand]) -> None:
    drive = running()
    iteration, sent = drive.state.iteration, len(drive.cluster.log)

    ask(drive, placed)
    state = drive.run_until(is_over)

    assert (gpus_of(state), state.components[Role.ACTOR].layout) == (placed.gpus, placed.layout)
    assert (state.incarnation, state.iteration) == (1, iteration)
    leads = [command for command in drive.cluster.log[sent:] if isinstance(command, cmd.LeadCommand)]
    assert [type(command) for command in leads] == [kind], "rollout and inference are asked nothing"
    assert [record.outcome for record in drive.cluster.store.records.values()][-1] is Outcome.COMMITTED
    owned = {slot for slot, record in drive.cluster.store.gpus.items() if record.owner == state.owner(Role.ACTOR)}
    assert owned == set(placed.gpus)
    assert {slot for slot in drive.cluster.job_spec.slots(Role.ACTOR) if drive.cluster.gates[slot].is_held} == owned
    assert drive.run().phase is Phase.FINISHED


def test_a_gpu_that_comes_has_a_new_token_and_one_that_stays_keeps_its_own() -> None:
    drive = running()
    before = {grant.gpu: grant.token for grant in drive.state.components[Role.ACTOR].grants}

    ask(drive, ELSEWHERE)
    drive.run_until(is_over)

    after = {grant.gpu: grant.token for grant in drive.state.components[Role.ACTOR].grants}
    assert after[SECOND] == before[SECOND]
    assert drive.cluster.store.gpus[OTHER_SPARE].token == after[OTHER_SPARE]
    assert drive.cluster.store.gpus[FIRST].state is GpuState.FREE


def test_a_resize_that_cannot_be_prepared_leaves_the_actor_as_it_was_and_is_not_asked_again() -> None:
    drive = running()
    was = drive.state.components[Role.ACTOR]
    drive.cluster.num_failing_resizes = 1

    ask(drive, LARGER)
    state = drive.run_until(is_over)

    assert state.components[Role.ACTOR] == was
    assert state.incarnation == 1
    drive.run_until(lambda state: not state.suspects(Role.ACTOR))
    assert drive.cluster.store.gpus[SPARE].state is GpuState.FREE
    assert drive.run().phase is Phase.FINISHED
    kinds = [part.kind for record in drive.cluster.store.records.values() for part in record.parts]
    assert kinds.count(PartKind.RESIZE) == 1


def test_a_worker_that_dies_as_it_comes_costs_the_resize_and_not_the_actor() -> None:
    drive = running()
    ask(drive, LARGER)
    transition = drive.state.resize()
    assert transition is not None
    coming = [record for record in drive.cluster.store.gpus.values() if record.gpu == SPARE]
    drive.cluster.gates[SPARE].highest, drive.cluster.gates[SPARE].is_held = coming[0].token, True

    drive.cluster.kill_worker(SPARE)
    drive.run_until(is_over)

    assert (drive.state.incarnation, gpus_of(drive.state)) == (1, (FIRST, SECOND))
    assert drive.run().phase is Phase.FINISHED


EITHER_ORDER = pytest.mark.parametrize(
    "is_late", [False, True], ids=["the death is reported first", "the lead reports first"]
)
REPLACED = Placed((SECOND, SPARE), Layout(dp=2))
"""A placement for which the first GPU leaves, the second stays, and a spare one comes."""
ANY_MEMBER = pytest.mark.parametrize("slot", [FIRST, SECOND, SPARE], ids=["it leaves", "it stays", "it comes"])


def deliver_all(drive: Drive) -> None:
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))


def die(drive: Drive, slot: GpuId, *, is_late: bool) -> None:
    """Kill a member in a resize. Its death is reported before the lead's next report, or after it if `is_late`."""
    drive.cluster.kill_worker(slot)
    death = drive.cluster.outbox.pop()
    if not is_late:
        drive.deliver(death)
    while not drive.cluster.outbox:
        assert drive.cluster.work()
    deliver_all(drive)
    if is_late:
        drive.deliver(death)


def take_gpu(drive: Drive, slot: GpuId) -> None:
    """Pass the gate, as a worker that comes does in the first phase, while the other ranks still work."""
    gate = drive.cluster.gates[slot]
    gate.highest, gate.is_held = drive.cluster.store.gpus[slot].token, True


@EITHER_ORDER
@ANY_MEMBER
def test_a_member_that_dies_before_the_commit_costs_the_resize_and_no_incarnation(slot: GpuId, is_late: bool) -> None:
    drive = running()
    iteration = drive.state.iteration
    ask(drive, REPLACED)
    deliver_all(drive)
    take_gpu(drive, SPARE)

    die(drive, slot, is_late=is_late)
    drive.run_until(lambda state: is_over(state) and not state.components[Role.ACTOR].lacks_ranks)

    assert (drive.state.incarnation, drive.state.iteration) == (1, iteration)
    assert (gpus_of(drive.state), drive.state.components[Role.ACTOR].layout) == ((FIRST, SECOND), Layout(dp=2))
    drive.run_until(lambda state: not state.suspects(Role.ACTOR))
    assert drive.cluster.store.gpus[SPARE].state is GpuState.FREE
    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


@pytest.mark.parametrize("placed", [LARGER, ELSEWHERE, TURNED], ids=["grow", "move", "another order"])
def test_a_resize_that_the_store_committed_is_open_until_the_lead_switched(placed: Placed) -> None:
    drive = running()
    ask(drive, placed)
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))

    assert drive.cluster.work(), "the lead commits"
    drive.decide()
    assert drive.state.resize() is not None
    assert gpus_of(drive.state) == (FIRST, SECOND)

    drive.now_ms += 3 * drive.cluster.job_spec.command_deadline_ms
    drive.decide()
    assert drive.state.resize() is not None, "there is no way back"
    drive.run_until(is_over)
    assert gpus_of(drive.state) == placed.gpus


def committed(drive: Drive, placed: Placed) -> None:
    """The store has committed the resize, and the lead has not reported it yet."""
    ask(drive, placed)
    deliver_all(drive)
    assert drive.cluster.work(), "the lead commits"
    drive.decide()


@EITHER_ORDER
@ANY_MEMBER
def test_a_member_that_dies_after_the_commit_is_replaced_in_the_new_layout(slot: GpuId, is_late: bool) -> None:
    drive = running()
    iteration = drive.state.iteration
    committed(drive, REPLACED)

    die(drive, slot, is_late=is_late)
    drive.run_until(lambda state: is_over(state) and not state.components[Role.ACTOR].lacks_ranks)

    assert (drive.state.incarnation, drive.state.iteration) == (1, iteration)
    assert (gpus_of(drive.state), drive.state.components[Role.ACTOR].layout) == (REPLACED.gpus, REPLACED.layout)
    assert drive.cluster.store.gpus[FIRST].state is GpuState.FREE
    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


@EITHER_ORDER
def test_a_resize_whose_members_all_died_costs_the_incarnation(is_late: bool) -> None:
    drive = running()
    committed(drive, Placed((SPARE,), Layout()))

    drive.cluster.kill_worker(SPARE)
    death = drive.cluster.outbox.pop()
    take_gpu(drive, SPARE)
    assert drive.cluster.work(), "it dies after it has switched"
    drive.cluster.gates[SPARE].is_held = False
    drive.cluster.outbox.insert(len(drive.cluster.outbox) if is_late else 0, death)
    deliver_all(drive)

    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 2)


@EITHER_ORDER
@pytest.mark.parametrize("slot", [FIRST, OTHER_SPARE], ids=["it survived the first", "it comes in its place"])
def test_a_death_as_a_dead_rank_is_brought_back_has_it_brought_back_again(slot: GpuId, is_late: bool) -> None:
    drive = running()
    ask(drive, LARGER)
    drive.run_until(is_over)
    drive.cluster.kill_worker(OTHER_SPARE)
    drive.run_until(lambda state: state.resize() is not None)
    deliver_all(drive)
    take_gpu(drive, OTHER_SPARE)

    die(drive, slot, is_late=is_late)
    drive.run_until(lambda state: not state.components[Role.ACTOR].lacks_ranks and is_over(state))

    assert (gpus_of(drive.state), drive.state.components[Role.ACTOR].layout) == (LARGER.gpus, LARGER.layout)
    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


@pytest.mark.parametrize("is_early", [False, True])
def test_the_loss_of_a_node_whose_gpus_a_committed_resize_brought_costs_the_incarnation(
    is_early: bool,
) -> None:
    drive = running()
    committed(drive, Placed((FIRST, SPARE, OTHER_SPARE), Layout(dp=3)))
    if is_early:
        drive.cluster.kill_worker(OTHER_SPARE)
        deliver_all(drive)

    drive.cluster.kill_instance(instance_id(Role.ACTOR, NodeId("n1")), tells=True)
    deliver_all(drive)

    assert drive.state.incarnation == 2
    assert drive.run().phase is Phase.FINISHED


def test_a_rank_that_dies_after_the_switch_is_replaced_in_the_new_layout() -> None:
    drive = running()
    ask(drive, LARGER)
    drive.run_until(is_over)

    drive.cluster.kill_worker(SPARE)
    drive.step()
    drive.run_until(lambda state: not state.components[Role.ACTOR].lacks_ranks)

    assert (gpus_of(drive.state), drive.state.components[Role.ACTOR].layout) == (LARGER.gpus, LARGER.layout)
    assert drive.run().phase is Phase.FINISHED
    assert drive.state.incarnation == 1


def test_an_actor_that_lacks_ranks_goes_at_once_to_where_it_is_asked() -> None:
    drive = running()
    drive.cluster.kill_worker(FIRST)
    drive.step()

    ask(drive, SMALLER)
    state = drive.run_until(is_over)

    assert (gpus_of(state), state.components[Role.ACTOR].layout, state.incarnation) == (SMALLER.gpus, Layout(), 1)
    assert drive.run().phase is Phase.FINISHED


def test_the_death_of_a_worker_that_stands_by_changes_nothing() -> None:
    drive = running()
    before, sent = drive.state.components, len(drive.cluster.log)

    died = ev.Failed(ev.FailedWhat.WORKER, (Grant(SPARE, NO_TOKEN),), -9, "killed", fatal=False)
    drive.cluster.voice.say(instance_id(Role.ACTOR, NodeId("n0")), died)
    drive.deliver(drive.cluster.outbox.pop())

    assert (drive.state.components, drive.cluster.log[sent:]) == (before, [])
    ask(drive, LARGER)
    assert gpus_of(drive.run_until(is_over)) == LARGER.gpus
    assert (drive.run().phase, drive.state.incarnation) == (Phase.FINISHED, 1)


def test_lost_ranks_that_do_not_come_back_by_the_deadline_cost_the_incarnation() -> None:
    drive = running()
    drive.cluster.kill_worker(FIRST)
    drive.cluster.hung.add(Role.ACTOR)
    drive.run_until(lambda state: state.resize() is not None)

    drive.cluster.hung.clear()
    drive.now_ms += 2 * drive.cluster.job_spec.command_deadline_ms
    drive.decide()
    assert drive.state.incarnation == 2
    assert drive.run().phase is Phase.FINISHED


def test_a_rank_that_dies_after_the_switch_and_whose_state_is_gone_restarts_the_actor_in_its_new_layout() -> None:
    drive = running()
    drive.cluster.keeps_state = False
    ask(drive, LARGER)
    drive.run_until(is_over)

    drive.cluster.kill_worker(SPARE)
    drive.run_until(lambda state: state.incarnation == 2 and state.components[Role.ACTOR].is_up)

    assert (gpus_of(drive.state), drive.state.components[Role.ACTOR].layout) == (LARGER.gpus, LARGER.layout)


def test_a_lead_without_effect_costs_the_resize_at_its_deadline_and_not_the_job() -> None:
    drive = running()
    drive.cluster.hung.add(Role.ACTOR)
    ask(drive, LARGER)
    assert drive.state.resize() is not None

    drive.cluster.hung.clear()
    drive.now_ms += 2 * drive.cluster.job_spec.command_deadline_ms
    drive.decide()

    assert is_over(drive.state)
    assert (drive.state.incarnation, gpus_of(drive.state)) == (1, (FIRST, SECOND))
    assert drive.run().phase is Phase.FINISHED


def test_the_lead_of_a_closed_resize_cannot_commit_it() -> None:
    drive = running()
    ask(drive, LARGER)
    drive.now_ms += 2 * drive.cluster.job_spec.command_deadline_ms
    drive.decide()
    assert is_over(drive.state)

    assert drive.cluster.work(), "the lead comes to its commit only now"
    drive.run_until(lambda state: not state.suspects(Role.ACTOR))

    assert gpus_of(drive.state) == (FIRST, SECOND)
    assert not drive.cluster.gates[SPARE].is_held
    assert drive.run().phase is Phase.FINISHED


@pytest.mark.parametrize(
    ("placed", "want"),
    [
        (Placed((FIRST, gpu("n0", 1)), Layout(dp=2)), "no slot of the actor"),
        (Placed((FIRST, FIRST), Layout(dp=2)), "named twice"),
        (Placed((FIRST,), Layout(tp=2, dp=3)), "= 2 * 1 * 3 * 1 = 6 ranks on 1 GPUs"),
        (
            Placed((FIRST, SECOND, SPARE, OTHER_SPARE, THIRD_SPARE), Layout(dp=5)),
            "dp=5 replicas cannot share a minibatch of 4 samples",
        ),
    ],
    ids=["another's GPU", "a GPU twice", "ranks and GPUs differ", "more replicas than samples"],
)
def test_a_resize_to_an_impossible_layout_is_refused_by_name(placed: Placed, want: str) -> None:
    drive = running(standby=(SPARE, OTHER_SPARE, THIRD_SPARE))
    assert want in (fault(drive.cluster.job_spec, placed) or "")

    ask(drive, placed)

    assert is_over(drive.state)
    assert drive.state.ignored["asks for what the actor cannot be"] == 1


def test_requests_are_open_until_each_has_ended_and_only_then_a_place_is_in_force() -> None:
    drive = running()
    home = drive.state.home(Role.ACTOR)
    assert home is not None
    assert is_in_force(drive.state, home)
    ask(drive, LARGER)
    drive.run_until(lambda state: state.resize() is not None)
    ask(drive, SMALLER)

    assert open_requests(drive.state) == (LARGER, SMALLER)
    assert not is_in_force(drive.state, home)

    drive.run_until(lambda state: open_requests(state) == (SMALLER,))
    assert gpus_of(drive.state) == LARGER.gpus
    state = drive.run_until(is_over)
    assert open_requests(state) == ()
    assert is_in_force(state, SMALLER)


def test_a_resize_asked_for_during_another_is_next_and_the_last_word_counts() -> None:
    drive = running()
    ask(drive, LARGER)
    ask(drive, Placed((FIRST, SECOND), Layout(tp=2)))
    ask(drive, SMALLER)

    drive.run_until(lambda state: gpus_of(state) == LARGER.gpus)
    drive.run_until(lambda state: gpus_of(state) == SMALLER.gpus)
    drive.run_until(is_over)

    assert drive.state.num_transitions == 5, "three starts and two resizes"


def test_a_layout_without_gpus_takes_the_first_free_slots_or_leaves_the_last() -> None:
    state = running().state
    assert target(state, Layout(dp=3)).gpus == (FIRST, SECOND, SPARE)
    assert target(state, Layout()).gpus == (FIRST,)
    lost = replace(state.gpus[SPARE], state=GpuState.LOST)
    assert target(replace(state, gpus={**state.gpus, SPARE: lost}), Layout(dp=3)).gpus == (FIRST, SECOND, OTHER_SPARE)
