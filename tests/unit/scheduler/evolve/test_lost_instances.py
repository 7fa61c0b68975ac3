"""Instances that are lost, lead again, come back, or stay away for good."""

from __future__ import annotations

from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import Phase
from tests.unit.scheduler.drive import Drive
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import NODES, spec
from tests.unit.scheduler.open_iteration import deliver_all, is_iterating, iterating
from tidegate.types import Role, instance_id


def test_a_new_lead_of_the_rollout_gets_the_open_command_again_under_its_epoch() -> None:
    drive = iterating()
    drive.cluster.kill_instance(instance_id(Role.ROLLOUT, NODES[0]), tells=True)

    state = drive.run()

    opened = [
        (command.plan.iteration, command.header.lead_epoch)
        for command in drive.cluster.log
        if isinstance(command, cmd.OpenIteration) and command.header.role is Role.ROLLOUT
    ]
    assert opened == [(0, 1), (0, 2), (1, 2)]
    assert (state.phase, state.incarnation) == (Phase.FINISHED, 1)


def test_a_new_lead_of_the_actor_starts_a_new_incarnation() -> None:
    drive = iterating()
    drive.cluster.elect(instance_id(Role.ACTOR, NODES[1]))

    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 2)


def test_the_rollout_works_for_good_without_a_node_that_does_not_come_back() -> None:
    drive = iterating()
    drive.cluster.has_supervisor = False
    drive.cluster.kill_instance(instance_id(Role.ROLLOUT, NODES[1]), tells=True)

    state = drive.run()

    assert (state.phase, state.incarnation) == (Phase.FINISHED, 1)


def test_a_living_instance_that_was_counted_as_lost_works_again_in_the_same_start() -> None:
    drive = iterating()
    name = instance_id(Role.ROLLOUT, NODES[1])
    drive.cluster.lapse(name)
    deliver_all(drive)
    assert not drive.state.instances[name].living

    drive.cluster.renew()
    deliver_all(drive)

    assert drive.state.instances[name].living
    assert len(drive.state.components[Role.ROLLOUT].grants) == 3
    assert drive.state.instances[name].boot == 1


def test_a_lead_that_was_counted_as_lost_leads_again_under_a_new_epoch_in_the_same_start() -> None:
    cluster = FakeCluster(spec())
    drive = Drive(cluster)
    name, other = (instance_id(Role.INFERENCE, node) for node in NODES)
    cluster.boot()
    drive.run_until(is_iterating)
    deliver_all(drive)
    cluster.lapse(other)
    cluster.lapse(name)
    deliver_all(drive)
    assert drive.state.lead_of(Role.INFERENCE) is None

    cluster.renew()
    deliver_all(drive)

    lead = drive.state.lead_of(Role.INFERENCE)
    assert lead is not None
    assert (lead.instance, lead.epoch, lead.boot) == (name, 2, 1)
    assert drive.run().phase is Phase.FINISHED
