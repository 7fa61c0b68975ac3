"""The request for a command to a lead carries all fields of the command."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.shell.requests import encode_command
from services.scheduler.state import commands as cmd
from services.scheduler.state.values import IterationPlan, Snapshot
from tests import component_bench
from tests.unit.scheduler.shell.command_header import FIRST, HEADER, SECOND
from tidegate.codec import decode_grants, decode_layout
from tidegate.types import Layout
from tidegate.v1 import commands_pb2, types_pb2


def as_published(version: int) -> tuple[Snapshot, types_pb2.Snapshot]:
    message = component_bench.snapshot(version)
    return Snapshot(1, version, message.checksum, "", message.SerializeToString()), message


WEIGHTS, WEIGHTS_MESSAGE = as_published(7)
REFERENCE, REFERENCE_MESSAGE = as_published(0)


@pytest.mark.parametrize(
    "command",
    [
        cmd.ScaleUp(HEADER, (FIRST,), (FIRST, SECOND), Layout(dp=2), None, None, ""),
        cmd.ScaleDown(HEADER, (FIRST,), (), None),
        cmd.Migrate(HEADER, (FIRST,), (), (SECOND,), Layout()),
        cmd.LoadWeights(HEADER, WEIGHTS, None),
        cmd.OpenIteration(HEADER, IterationPlan(1, 1, 4, 4, 2, 2, 7)),
        cmd.CloseIteration(HEADER, 1, last=False),
        cmd.Evaluate(HEADER, 1, 1),
        cmd.Suspend(HEADER, (FIRST,)),
        cmd.Resume(HEADER, (FIRST,), Layout()),
        cmd.HoldTraining(HEADER, 1, holds=True),
        cmd.OrderGroups(HEADER, 1, (1, 0)),
    ],
    ids=lambda command: type(command).__name__,
)
def test_every_command_carries_its_header_whole(command: Any) -> None:
    header = encode_command(command, config_json="{}", term=2).header
    assert (header.id, header.job, header.incarnation) == (HEADER.id, "bench", 4)
    assert (header.transition_id, header.deadline_unix_ms, header.lead_epoch) == ("t1", 1_234_567, 3)
    assert header.term == 2
    assert list(header.instances) == [commands_pb2.InstanceAddress(instance="actor@n0", endpoint="127.0.0.1:1", boot=9)]
    assert decode_grants(header.members) == (FIRST, SECOND)


def test_a_scale_up_carries_the_new_grants_all_members_and_the_weights() -> None:
    command = cmd.ScaleUp(HEADER, (SECOND,), (FIRST, SECOND), Layout(tp=2), WEIGHTS, REFERENCE, "it1")
    request = encode_command(command, config_json='{"job": "bench"}', term=2)
    assert isinstance(request, commands_pb2.ScaleUpRequest)
    assert decode_grants(request.grants) == (SECOND,)
    assert decode_grants(request.members) == (FIRST, SECOND), "in rank order"
    assert decode_layout(request.layout) == Layout(tp=2)
    assert (request.weights, request.reference) == (WEIGHTS_MESSAGE, REFERENCE_MESSAGE)
    assert (request.checkpoint, request.config_json) == ("it1", '{"job": "bench"}')


def test_before_the_first_publish_a_scale_up_names_no_weights() -> None:
    command = cmd.ScaleUp(HEADER, (FIRST,), (FIRST,), Layout(), None, None, "")
    request = encode_command(command, config_json="{}", term=2)
    assert isinstance(request, commands_pb2.ScaleUpRequest)
    assert (request.HasField("weights"), request.HasField("reference")) == (False, False)


def test_a_migrate_carries_leaving_grants_new_grants_and_members() -> None:
    request = encode_command(cmd.Migrate(HEADER, (FIRST,), (SECOND,), (SECOND,), Layout()), config_json="{}", term=2)
    assert isinstance(request, commands_pb2.MigrateRequest)
    assert decode_grants(getattr(request, "from")) == (FIRST,)
    assert (decode_grants(request.to), decode_grants(request.members)) == ((SECOND,), (SECOND,))
    assert decode_layout(request.layout) == Layout()


def test_a_scale_down_carries_leaving_grants_and_members() -> None:
    request = encode_command(cmd.ScaleDown(HEADER, (FIRST,), (SECOND,), Layout(dp=1)), config_json="{}", term=2)
    assert isinstance(request, commands_pb2.ScaleDownRequest)
    assert (decode_grants(request.grants), decode_grants(request.members)) == ((FIRST,), (SECOND,))


def test_a_load_carries_the_published_snapshot_unread() -> None:
    request = encode_command(cmd.LoadWeights(HEADER, WEIGHTS, REFERENCE), config_json="{}", term=2)
    assert isinstance(request, commands_pb2.LoadWeightsRequest)
    assert (request.weights, request.reference) == (WEIGHTS_MESSAGE, REFERENCE_MESSAGE)


def test_an_iteration_is_opened_by_its_whole_plan_and_closed_by_its_number() -> None:
    numbers = {"iteration": 3, "version": 4, "first_prompt": 12, "num_prompts": 4, "group_size": 2}
    numbers |= {"num_minibatches": 2, "seed": 11, "max_extra_prompts": 5}
    plan = IterationPlan(**numbers)
    opened = encode_command(cmd.OpenIteration(HEADER, plan), config_json="{}", term=2)
    assert isinstance(opened, commands_pb2.OpenIterationRequest)
    assert opened.plan == types_pb2.IterationPlan(**numbers)
    closed = encode_command(cmd.CloseIteration(HEADER, 3, last=True), config_json="{}", term=2)
    assert isinstance(closed, commands_pb2.CloseIterationRequest)
    assert (closed.iteration, closed.last) == (3, True)


def test_an_evaluate_command_carries_its_version() -> None:
    request = encode_command(cmd.Evaluate(HEADER, 3, 4), config_json="{}", term=2)
    assert isinstance(request, commands_pb2.EvaluateRequest)
    assert request.plan == types_pb2.EvaluationPlan(iteration=3, version=4)


def test_a_suspend_carries_leaving_grants_and_a_resume_carries_new_grants_in_rank_order() -> None:
    suspend = encode_command(cmd.Suspend(HEADER, (FIRST, SECOND)), config_json="{}", term=2)
    assert isinstance(suspend, commands_pb2.SuspendRequest)
    assert decode_grants(suspend.grants) == (FIRST, SECOND)
    resume = encode_command(cmd.Resume(HEADER, (SECOND, FIRST), Layout(tp=2)), config_json="{}", term=2)
    assert isinstance(resume, commands_pb2.ResumeRequest)
    assert (decode_grants(resume.grants), decode_layout(resume.layout)) == ((SECOND, FIRST), Layout(tp=2))


def test_hold_and_order_commands_carry_the_number_of_their_iteration() -> None:
    hold = encode_command(cmd.HoldTraining(HEADER, 3, holds=True), config_json="{}", term=2)
    assert isinstance(hold, commands_pb2.HoldTrainingRequest)
    assert (hold.iteration, hold.holds) == (3, True)
    order = encode_command(cmd.OrderGroups(HEADER, 3, (2, 0, 1)), config_json="{}", term=2)
    assert isinstance(order, commands_pb2.OrderGroupsRequest)
    assert (order.iteration, list(order.groups)) == (3, [2, 0, 1])
