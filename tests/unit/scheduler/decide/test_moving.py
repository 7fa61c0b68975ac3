"""GPUs that go from one component to another while all of them work: each move in each direction, and its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.decision import decision_on
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.components import Suspended
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
    running,
    settle,
)
from tests.unit.scheduler.drive import Drive
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.ownership.records import IllegalStep, Outcome
from tidegate.types import CommandId, Layout, Role, Token


def asked(drive: Drive, sent: int) -> list[tuple[str, Role]]:
    leads = [command for command in drive.cluster.log[sent:] if isinstance(command, cmd.LeadCommand)]
    return [(type(command).__name__, command.header.role) for command in leads]


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
