"""GPUs that go from one component to another while all of them work: each move in each direction, refused, overdue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.decision import decision_on
from services.scheduler.evolve.losses import MAX_FAILED_STARTS
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Suspended
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import NODES, gpu, spec
from tests.unit.scheduler.proposals import ProposalMaker
from tidegate.ownership.records import GpuState, IllegalStep, Outcome
from tidegate.types import CommandId, GpuId, Grant, Layout, NodeId, Role, Token, instance_id

ACTOR = (gpu("n0", 0), gpu("n1", 0))
ROLLOUT = (gpu("n0", 1), gpu("n1", 1), gpu("n1", 3))
INFERENCE = (gpu("n0", 2), gpu("n1", 2))


def engines(*gpus: GpuId) -> Placed:
    return Placed(gpus, Layout(dp=len(gpus)))


HOME = spec().placement


def running(job: JobSpec | None = None) -> tuple[Drive, ProposalMaker]:
    """A job whose first iteration is open, with all events delivered, and training on hold."""
    proposed = ProposalMaker()
    drive = booted(FakeCluster(job or spec()))
    drive.propose = proposed
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    settle(drive)
    return drive, proposed


def deliver_all(drive: Drive) -> None:
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))


def settle(drive: Drive) -> None:
    """Carry out the proposal as far as possible without a wait."""
    drive.decide()
    deliver_all(drive)
    while any(lead is not None and (lead.resize or lead.suspension) for lead in drive.cluster.leads.values()):
        assert drive.cluster.work()
        deliver_all(drive)


def propose(drive: Drive, proposed: ProposalMaker, **placement: Placed | None) -> ClusterState:
    proposed.placement = {Role(role): placed for role, placed in placement.items()}
    settle(drive)
    return drive.state


def gpus_of(state: ClusterState, role: Role) -> tuple[GpuId, ...]:
    return tuple(grant.gpu for grant in state.components[role].grants)


def asked(drive: Drive, sent: int) -> list[tuple[str, Role]]:
    leads = [command for command in drive.cluster.log[sent:] if isinstance(command, cmd.LeadCommand)]
    return [(type(command).__name__, command.header.role) for command in leads]


def finishes(drive: Drive, proposed: ProposalMaker) -> None:
    """The job ends as if nothing had moved: no sample is lost, the incarnation is the first, all GPUs are free."""
    proposed.placement, proposed.trains = {}, True
    drive.decide()
    state = drive.run()
    assert (state.phase, state.incarnation, state.message) == (Phase.FINISHED, 1, "all 2 iterations are done")
    assert not any(summary.num_lost or summary.num_duplicates for summary in state.summaries)
    assert not any(gate.is_held for gate in drive.cluster.gates.values())


MOVES: dict[str, tuple[dict[str, Placed | None], dict[str, Placed | None], list[tuple[str, Role]]]] = {
    "the rollout gives engines back": (
        {},
        {"rollout": engines(ROLLOUT[1])},
        [("ScaleDown", Role.ROLLOUT)],
    ),
    "the rollout gives all engines back": (
        {},
        {"rollout": None},
        [("ScaleDown", Role.ROLLOUT)],
    ),
    "the rollout gets engines again": (
        {"rollout": engines(ROLLOUT[1])},
        {},
        [("ScaleUp", Role.ROLLOUT)],
    ),
    "the rollout gets its first engines again": (
        {"rollout": None},
        {"rollout": engines(ROLLOUT[2], ROLLOUT[0])},
        [("ScaleUp", Role.ROLLOUT), ("LoadWeights", Role.ROLLOUT)],
    ),
    "the actor lends all its GPUs to the rollout": (
        {},
        {"actor": None, "rollout": engines(*ROLLOUT, *ACTOR)},
        [("Suspend", Role.ACTOR), ("ScaleUp", Role.ROLLOUT)],
    ),
    "the actor takes its GPUs back": (
        {"actor": None, "rollout": engines(ACTOR[0], *ROLLOUT, ACTOR[1])},
        {},
        [("ScaleDown", Role.ROLLOUT), ("Resume", Role.ACTOR)],
    ),
    "the inference lends its GPUs to the rollout": (
        {},
        {"inference": None, "rollout": engines(*INFERENCE, *ROLLOUT)},
        [("ScaleDown", Role.INFERENCE), ("ScaleUp", Role.ROLLOUT)],
    ),
    "the inference takes its GPUs back": (
        {"inference": None, "rollout": engines(*INFERENCE, *ROLLOUT)},
        {},
        [("ScaleDown", Role.ROLLOUT), ("ScaleUp", Role.INFERENCE), ("LoadWeights", Role.INFERENCE)],
    ),
    "the inference grows onto engines": (
        {},
        {"rollout": engines(ROLLOUT[0]), "inference": Placed((*INFERENCE, *ROLLOUT[1:]), Layout(tp=2, dp=2))},
        [("ScaleDown", Role.ROLLOUT), ("ScaleUp", Role.INFERENCE)],
    ),
    "the inference gives a part of it to the actor": (
        {"rollout": engines(ROLLOUT[0]), "inference": Placed((*INFERENCE, *ROLLOUT[1:]), Layout(tp=2, dp=2))},
        {"actor": Placed((*ACTOR, *INFERENCE), Layout(dp=4)), "rollout": engines(ROLLOUT[0]),
         "inference": Placed(ROLLOUT[1:], Layout(tp=2))},
        [("ScaleDown", Role.INFERENCE), ("ScaleUp", Role.ACTOR)],
    ),
    "the actor takes all": (
        {},
        {"actor": Placed((*ROLLOUT, *INFERENCE, *ACTOR), Layout(dp=7)), "rollout": None, "inference": None},
        [("ScaleDown", Role.ROLLOUT), ("ScaleDown", Role.INFERENCE), ("ScaleUp", Role.ACTOR)],
    ),
    "the actor goes home from all": (
        {"actor": Placed((*ROLLOUT, *INFERENCE, *ACTOR), Layout(dp=7)), "rollout": None, "inference": None},
        {},
        [("ScaleDown", Role.ACTOR), ("ScaleUp", Role.ROLLOUT), ("LoadWeights", Role.ROLLOUT),
         ("ScaleUp", Role.INFERENCE), ("LoadWeights", Role.INFERENCE)],
    ),
    "the actor goes to none and comes back elsewhere": (
        {"actor": None},
        {"actor": Placed((ROLLOUT[0],), Layout()), "rollout": engines(*ROLLOUT[1:])},
        [("ScaleDown", Role.ROLLOUT), ("Resume", Role.ACTOR)],
    ),
    "actor and rollout change places": (
        {},
        {"actor": Placed(ROLLOUT, Layout(dp=3)), "rollout": engines(*ACTOR)},
        [("ScaleDown", Role.ROLLOUT), ("Migrate", Role.ACTOR), ("ScaleUp", Role.ROLLOUT),
         ("LoadWeights", Role.ROLLOUT)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_gpus_go_where_they_are_proposed_within_an_open_iteration(case: str) -> None:
    before, after, want = MOVES[case]
    drive, proposed = running()
    propose(drive, proposed, **before)
    iteration, sent = drive.state.iteration, len(drive.cluster.log)

    state = propose(drive, proposed, **after)

    for role in Role:
        placed = proposed(state).placement[role]
        assert set(gpus_of(state, role)) == set(placed.gpus if placed else ()), role
        assert state.components[role].layout == (placed.layout if placed else None)
        owned = {slot for slot, record in drive.cluster.store.gpus.items() if record.owner == state.owner(role)}
        assert owned == set(gpus_of(state, role))
    assert not state.transitions
    assert (state.incarnation, state.iteration) == (1, iteration)
    assert sorted(asked(drive, sent)) == sorted(want)
    assert all(record.outcome is Outcome.COMMITTED for record in drive.cluster.store.records.values())
    finishes(drive, proposed)


def test_a_working_rollout_gets_the_weights_for_the_engines_that_come() -> None:
    drive, proposed = running()
    propose(drive, proposed, actor=None, rollout=engines(*ROLLOUT, *ACTOR))

    up = [command for command in drive.cluster.log if isinstance(command, cmd.ScaleUp)][-1]
    assert up.weights == drive.state.snapshots[0]
    assert [grant.gpu for grant in up.grants] == list(ACTOR)
    assert [grant.gpu for grant in up.members] == [*ROLLOUT, *ACTOR]
    assert up.layout == Layout(dp=5)


def test_a_suspended_actor_takes_up_no_checkpoint_and_publishes_nothing_anew() -> None:
    drive, proposed = running()
    propose(drive, proposed, actor=None)
    assert drive.state.components[Role.ACTOR].state == Suspended(HOME[Role.ACTOR])
    num_events = len(drive.delivered)

    state = propose(drive, proposed)

    assert not state.components[Role.ACTOR].is_suspended
    assert not any(isinstance(event.body, ev.WeightsPublished) for event in drive.delivered[num_events:])
    tokens = [grant.token for grant in state.components[Role.ACTOR].grants]
    assert tokens == [Token(1, 2)] * 2
    assert state.next_iteration == 0
    finishes(drive, proposed)


def test_engines_of_several_gpus_move_whole_and_in_their_own_order_of_ranks() -> None:
    job = replace(
        spec(),
        placement={**HOME, Role.ROLLOUT: Placed((ROLLOUT[0], ROLLOUT[1]), Layout(tp=2))},
        standby=(ROLLOUT[2], gpu("n0", 3)),
    )
    drive, proposed = running(job)
    grown = Placed((ACTOR[1], ACTOR[0], ROLLOUT[1], ROLLOUT[0]), Layout(tp=2, dp=2))

    state = propose(drive, proposed, actor=None, rollout=grown)

    assert gpus_of(state, Role.ROLLOUT) == (ACTOR[1], ACTOR[0], ROLLOUT[0], ROLLOUT[1])
    state = propose(drive, proposed, actor=None, rollout=Placed((ACTOR[0], ACTOR[1]), Layout(tp=2)))
    assert gpus_of(state, Role.ROLLOUT) == (ACTOR[1], ACTOR[0]), "an engine keeps its own order of ranks"
    state = propose(drive, proposed, actor=None, rollout=Placed((ACTOR[0], ROLLOUT[0]), Layout(tp=2)))
    assert gpus_of(state, Role.ROLLOUT) == (ACTOR[0], ROLLOUT[0]), "half an engine is none"


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


def test_a_gpu_waits_for_no_other_on_its_way_to_the_rollout() -> None:
    drive, proposed = running()
    drive.cluster.hung.add(Role.ACTOR)

    state = propose(drive, proposed, actor=None, inference=None, rollout=engines(*ROLLOUT, *ACTOR, *INFERENCE))

    assert gpus_of(state, Role.ROLLOUT) == (*ROLLOUT, *INFERENCE)
    assert state.components[Role.ROLLOUT].layout == Layout(dp=5)


def test_several_transitions_are_open_at_once_one_of_each_role() -> None:
    drive, proposed = running()
    drive.cluster.hung |= set(Role)
    state = propose(drive, proposed, actor=None, rollout=None, inference=None)
    assert sorted(part.role for each in state.transitions.values() for part in each.parts) == sorted(Role)


OPEN_CHANGES: dict[str, dict[str, Placed | None]] = {
    "fewer engines": {"rollout": engines(ROLLOUT[0])},
    "no engines": {"rollout": None},
    "no inference": {"inference": None},
    "a suspended actor": {"actor": None},
    "a smaller actor": {"actor": Placed(ACTOR[:1], Layout())},
}


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


def kill(drive: Drive, slot: GpuId) -> None:
    drive.cluster.kill_worker(slot)
    drive.deliver(drive.cluster.outbox.pop())


def ready(drive: Drive, proposed: ProposalMaker, **placement: Placed | None) -> None:
    """The lead has its command, and has done nothing yet."""
    proposed.placement = {Role(role): placed for role, placed in placement.items()}
    drive.decide()
    deliver_all(drive)
    assert drive.state.transitions


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


def test_an_actor_that_cannot_be_resumed_costs_the_incarnation_in_the_end() -> None:
    drive, proposed = running()
    propose(drive, proposed, actor=None)
    node = instance_id(Role.ACTOR, NodeId("n1"))
    drive.cluster.instances[node].is_alive = False
    proposed.placement = {}
    drive.cluster.has_supervisor = False
    drive.run_until(lambda state: state.incarnation == 2)
    assert "the actor failed to resume 4 times in a row" in drive.state.message


def test_a_job_that_ends_while_gpus_move_gives_all_back() -> None:
    for case in ("fewer engines", "a suspended actor", "a smaller actor"):
        drive, proposed = running()
        ready(drive, proposed, **OPEN_CHANGES[case])
        drive.cluster.voice.say("control", ev.JobCancelRequested("enough"))
        assert drive.run().phase is Phase.CANCELLED
        assert not any(record.owner for record in drive.cluster.store.gpus.values())


def test_a_manual_move_to_the_actors_present_gpus_makes_them_its_home() -> None:
    drive, proposed = running(spec(standby=(gpu("n0", 3),)))
    placed = Placed((ACTOR[0], gpu("n0", 3)), Layout(dp=2))
    propose(drive, proposed, actor=placed)
    assert drive.state.home(Role.ACTOR) == HOME[Role.ACTOR], "what a policy does is no home"

    drive.cluster.voice.say("control", ev.ResizeRequested(placed))
    deliver_all(drive)
    assert (drive.state.home(Role.ACTOR), drive.state.asked) == (placed, None)
    propose(drive, proposed, actor=Placed((ACTOR[0],), Layout()))
    assert drive.state.home(Role.ACTOR) == placed


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


def test_the_reason_of_a_move_says_where_gpus_go() -> None:
    drive, proposed = running()
    proposed.placement = {Role.ACTOR: None}
    decision = decision_on(drive.state, proposed(drive.state), drive.now_ms)
    assert "the actor gives 2 of 2 GPUs back" in decision.reason


def test_engines_that_come_one_after_the_other_to_none_load_the_weights_each_time() -> None:
    drive, proposed = running()
    for slot in (*ROLLOUT, *INFERENCE, *ROLLOUT):
        propose(drive, proposed, inference=None, rollout=engines(slot))
        propose(drive, proposed, inference=None, rollout=None)
    propose(drive, proposed)

    loads = [command for command in drive.cluster.log if isinstance(command, cmd.LoadWeights)]
    assert len({load.header.id for load in loads}) == len(loads)
    assert drive.state.holds(Role.ROLLOUT, 0)
    finishes(drive, proposed)


def decisions_of(drive: Drive, since: int) -> list[list[str]]:
    """The commands of each decision from the `since`-th look on, without those that it did not need."""
    made = [decision for _, _, decision in drive.seen[since:] if decision is not None]
    return [[_named(command) for command in decision.commands] for decision in made if decision.commands]


def _named(command: cmd.Command) -> str:
    return f"to {command.to_state}" if isinstance(command, cmd.AdvanceMove) else type(command).__name__


def test_steps_that_need_the_store_alone_are_commanded_together() -> None:
    drive, proposed = running()
    seen = len(drive.seen)
    propose(drive, proposed, actor=Placed((*ACTOR, ROLLOUT[0]), Layout(dp=3)), rollout=engines(*ROLLOUT[1:]))
    assert decisions_of(drive, seen) == [
        ["PlanTransition", "to draining"],
        ["ScaleDown"],
        ["CommitPart", "to released", "CloseTransition"],
        ["PlanTransition", "to acquiring"],
        ["ScaleUp"],
        ["CloseTransition"],
    ]


def test_only_steps_that_the_store_allows_are_commanded_together() -> None:
    drive, proposed = running()
    proposed.placement = {Role.ROLLOUT: None}
    drive.decide()
    (transition,) = drive.state.transitions.values()
    store, seen = drive.cluster.store, len(drive.seen)
    # As after a release that the store did not take.
    with pytest.raises(IllegalStep, match="not yet released"):
        store.operate(cmd.CommitPart(CommandId("early"), transition.id, Role.ROLLOUT, None))
    with pytest.raises(IllegalStep, match="cannot end committed"):
        store.operate(cmd.CloseTransition(CommandId("early"), transition.id, Outcome.COMMITTED))
    settle(drive)
    released = [commands for commands in decisions_of(drive, seen) if "to released" in commands]
    assert released == [[*["to released"] * len(ROLLOUT), "CommitPart", "CloseTransition"]]
    finishes(drive, proposed)
