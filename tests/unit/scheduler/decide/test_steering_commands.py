"""A lead gets a command to hold training or to order prompts once, and again only when the choice changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from services.scheduler.decide.proposals import proposal_of
from services.scheduler.policy import Proposal
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import NODES, spec
from tidegate.types import Role, instance_id


@dataclass
class Steered:
    """A policy that moves nothing. A test sets the rest of its proposal."""

    trains: bool = True
    group_order: tuple[int, ...] = ()

    def __call__(self, state: ClusterState) -> Proposal:
        return replace(proposal_of(state, StaticPolicy(), 0).proposal, trains=self.trains, group_order=self.group_order)


def iterating() -> tuple[Drive, Steered]:
    steered = Steered()
    drive = booted(FakeCluster(spec()))
    drive.propose = steered
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    deliver_all(drive)
    return drive, steered


def deliver_all(drive: Drive) -> None:
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))


def steering_commands(drive: Drive) -> list[cmd.HoldTraining | cmd.OrderGroups]:
    return [command for command in drive.cluster.log if isinstance(command, cmd.HoldTraining | cmd.OrderGroups)]


def test_an_actor_that_is_held_trains_nothing_until_it_is_let_go() -> None:
    drive, steered = iterating()
    steered.trains = False
    drive.decide()
    deliver_all(drive)
    assert drive.cluster.work()
    deliver_all(drive)
    assert drive.state.iteration is not None
    assert set(drive.state.iteration.reports) == {Role.ROLLOUT, Role.INFERENCE}

    steered.trains = True
    drive.decide()
    drive.run_until(lambda state: state.next_iteration == 1)

    assert [
        (each.iteration, each.holds) for each in steering_commands(drive) if isinstance(each, cmd.HoldTraining)
    ] == [
        (0, True),
        (0, False),
    ]
    assert drive.run().phase is Phase.FINISHED


def test_an_order_that_a_lead_took_is_not_sent_again_and_a_new_order_has_another_id() -> None:
    drive, steered = iterating()
    for order in ((3, 2, 1, 0), (3, 2, 1, 0), (0, 1, 2, 3), ()):
        steered.group_order = order
        drive.decide()
        deliver_all(drive)

    orders = [each for each in steering_commands(drive) if isinstance(each, cmd.OrderGroups)]
    assert [each.groups for each in orders] == [(3, 2, 1, 0), (0, 1, 2, 3)]
    assert len({each.header.id for each in orders}) == 2
    lead = drive.cluster.leads[Role.ROLLOUT]
    assert lead is not None
    assert lead.group_order == (0, 1, 2, 3)


def test_a_steering_command_under_way_is_repeated_unchanged_before_another_is_sent() -> None:
    drive, steered = iterating()
    steered.trains, steered.group_order = False, (3, 2, 1, 0)
    drive.num_losses = 1
    drive.decide()
    assert steering_commands(drive) == [], "its commands were lost"

    steered.trains, steered.group_order = True, (1, 0, 2, 3)
    drive.decide()
    assert steering_commands(drive) == [], "nothing is asked again before its deadline"
    drive.now_ms += drive.cluster.job_spec.command_deadline_ms
    drive.decide()
    deliver_all(drive)

    said = [each.holds if isinstance(each, cmd.HoldTraining) else each.groups for each in steering_commands(drive)]
    assert said == [True, (3, 2, 1, 0), False, (1, 0, 2, 3)]
    deliver_all(drive)
    assert drive.state.iteration is not None
    assert not drive.state.iteration.steering.is_held
    assert drive.state.iteration.steering.group_order == (1, 0, 2, 3)


@pytest.mark.parametrize("is_given_once", [False, True])
def test_each_iteration_begins_unheld_and_a_new_rollout_lead_gets_the_order_again(is_given_once: bool) -> None:
    drive, steered = iterating()
    steered.group_order = (3, 2, 1, 0)
    drive.decide()
    deliver_all(drive)
    if is_given_once:
        steered.group_order = ()
    drive.cluster.elect(instance_id(Role.ROLLOUT, NODES[1]))
    deliver_all(drive)

    epochs = [each.header.lead_epoch for each in steering_commands(drive)]
    assert epochs == [1, 2]
    drive.run_until(lambda state: state.next_iteration == 1 and state.iteration is not None)
    assert drive.state.iteration is not None
    assert drive.state.iteration.steering.group_order == ()
    assert drive.run().phase is Phase.FINISHED


def test_a_repeated_answer_to_a_steering_command_changes_nothing() -> None:
    drive, steered = iterating()
    steered.trains = False
    drive.decide()
    answers = [event for event in drive.cluster.outbox if isinstance(event.body, ev.CommandAnswered)]
    deliver_all(drive)
    for answer in answers:
        drive.deliver(answer)

    assert drive.state.iteration is not None
    assert drive.state.iteration.steering.is_held
    assert len(steering_commands(drive)) == 1


def test_a_lead_that_refuses_for_good_ends_the_job_with_its_words() -> None:
    drive, steered = iterating()
    steered.trains = False
    lead = drive.cluster.leads[Role.ACTOR]
    assert lead is not None
    lead.plan = None
    drive.decide()

    state = drive.run()

    assert state.phase is Phase.FAILED
    assert "HoldTraining of the actor was asked 5 times without effect, refused 5 times: iteration 0 is not open" in (
        state.message
    )
