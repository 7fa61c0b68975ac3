"""Encode the scheduler's commands to leads as requests of the wire protocol."""

from __future__ import annotations

from typing import TypeAlias

from services.scheduler.state import commands as cmd
from services.scheduler.state.values import IterationPlan, Snapshot
from tidegate.codec import encode_grants, encode_layout
from tidegate.types import Layout
from tidegate.v1 import commands_pb2, types_pb2

Request: TypeAlias = (
    commands_pb2.ScaleUpRequest
    | commands_pb2.ScaleDownRequest
    | commands_pb2.MigrateRequest
    | commands_pb2.LoadWeightsRequest
    | commands_pb2.OpenIterationRequest
    | commands_pb2.CloseIterationRequest
    | commands_pb2.EvaluateRequest
    | commands_pb2.SuspendRequest
    | commands_pb2.ResumeRequest
    | commands_pb2.HoldTrainingRequest
    | commands_pb2.OrderGroupsRequest
)


def encode_command(command: cmd.LeadCommand, *, config_json: str, term: int) -> Request:
    """`config_json` is the job's resolved config. A scale-up carries it to the component. `term`: of the store."""
    header = _header(command.header, term)
    match command:
        case cmd.ScaleUp():
            return commands_pb2.ScaleUpRequest(
                header=header,
                grants=encode_grants(command.grants),
                members=encode_grants(command.members),
                layout=encode_layout(command.layout),
                weights=_snapshot(command.weights),
                reference=_snapshot(command.reference),
                checkpoint=command.checkpoint,
                config_json=config_json,
            )
        case cmd.ScaleDown():
            return commands_pb2.ScaleDownRequest(
                header=header,
                grants=encode_grants(command.grants),
                members=encode_grants(command.members),
                layout=encode_layout(command.layout or Layout()),
            )
        case cmd.Migrate():
            request = commands_pb2.MigrateRequest(
                header=header,
                to=encode_grants(command.coming),
                members=encode_grants(command.members),
                layout=encode_layout(command.layout),
            )
            # `from` is a keyword of Python.
            getattr(request, "from").extend(encode_grants(command.leaving))
            return request
        case cmd.LoadWeights():
            return commands_pb2.LoadWeightsRequest(
                header=header, weights=_snapshot(command.weights), reference=_snapshot(command.reference)
            )
        case cmd.OpenIteration():
            return commands_pb2.OpenIterationRequest(header=header, plan=_plan(command.plan))
        case cmd.CloseIteration():
            return commands_pb2.CloseIterationRequest(header=header, iteration=command.iteration, last=command.last)
        case cmd.Evaluate():
            plan = types_pb2.EvaluationPlan(iteration=command.iteration, version=command.version)
            return commands_pb2.EvaluateRequest(header=header, plan=plan)
        case _:
            return _encode_amid_iteration(command, header)


def _encode_amid_iteration(
    command: cmd.Suspend | cmd.Resume | cmd.HoldTraining | cmd.OrderGroups, header: commands_pb2.CommandHeader
) -> Request:
    """Encode a command that a component gets in the middle of an iteration."""
    match command:
        case cmd.Suspend():
            return commands_pb2.SuspendRequest(header=header, grants=encode_grants(command.grants))
        case cmd.Resume():
            return commands_pb2.ResumeRequest(
                header=header, grants=encode_grants(command.grants), layout=encode_layout(command.layout)
            )
        case cmd.HoldTraining():
            return commands_pb2.HoldTrainingRequest(header=header, iteration=command.iteration, holds=command.holds)
        case cmd.OrderGroups():
            return commands_pb2.OrderGroupsRequest(header=header, iteration=command.iteration, groups=command.groups)


def _header(header: cmd.Header, term: int) -> commands_pb2.CommandHeader:
    return commands_pb2.CommandHeader(
        id=header.id,
        job=header.job,
        incarnation=header.incarnation,
        transition_id=header.transition_id,
        deadline_unix_ms=header.deadline_ms,
        lead_epoch=header.lead_epoch,
        instances=[
            commands_pb2.InstanceAddress(instance=each.instance, endpoint=each.endpoint, boot=each.boot)
            for each in header.instances
        ],
        members=encode_grants(header.members),
        term=term,
    )


def _snapshot(snapshot: Snapshot | None) -> types_pb2.Snapshot | None:
    return types_pb2.Snapshot.FromString(snapshot.message) if snapshot else None


def _plan(plan: IterationPlan) -> types_pb2.IterationPlan:
    return types_pb2.IterationPlan(
        iteration=plan.iteration,
        version=plan.version,
        first_prompt=plan.first_prompt,
        num_prompts=plan.num_prompts,
        group_size=plan.group_size,
        num_minibatches=plan.num_minibatches,
        seed=plan.seed,
        max_extra_prompts=plan.max_extra_prompts,
    )
