"""The gRPC face of a component: the lead's commands. Each takes effect once, however often it is issued.

Order:
1. check the header, and each grant and layout;
2. return the stored result of the same id, if there is one;
3. ask the lead to accept the command;
4. store the result;
5. answer. The work begins after that.

Invariants:
- A repeat gets the stored result and is not worked on again. [test_component: sent_again_gets_the_stored_answer]
- A stored command is worked on, also where its caller dies or the store's answer is lost meanwhile.
  [test_component: whose_caller_dies] [test_component: whose_storing_has_an_unknown_outcome]
- A command that was decided after a failover of the store waits until this instance has joined again.
  [test_component: first_after_a_failover]
- A command that was decided before a failover is refused after it. [test_component: decided_before_a_failover]
- A repeat brings the lead the present addresses. [test_component: sent_again_brings_the_present_addresses]
- A command that cannot be decoded is answered INVALID_ARGUMENT, and changes nothing.
  [test_fuzzed_requests: command_of_any_fields]
- A refusal is not stored, so that the command may be issued again when its obstacle is gone.
  [test_component: a_refused_command_gets]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc

from tidegate.codec import check_parts, check_plan, require
from tidegate.ownership.records import StoreNotAdopted
from tidegate.ports.store import CommandLog
from tidegate.runtime.host import ComponentHost
from tidegate.runtime.lead import Command, CommandRefused, Lead
from tidegate.types import CommandId, JobId
from tidegate.v1 import commands_pb2, commands_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ComponentServicer(commands_pb2_grpc.ComponentServicer):
    """See the module head. `log`: the host's own client of the store."""

    def __init__(self, job: JobId, host: Callable[[], ComponentHost], log: CommandLog) -> None:
        self._job = job
        self._host = host
        self._log = log
        self._storing: set[asyncio.Task[None]] = set()

    async def ScaleUp(self, request: commands_pb2.ScaleUpRequest, context: Context) -> commands_pb2.ScaleUpResponse:
        require(request, "grants", "members", "layout", "config_json")
        return commands_pb2.ScaleUpResponse(result=await self._accept_once(request))

    async def ScaleDown(
        self, request: commands_pb2.ScaleDownRequest, context: Context
    ) -> commands_pb2.ScaleDownResponse:
        require(request, "grants")
        return commands_pb2.ScaleDownResponse(result=await self._accept_once(request))

    async def LoadWeights(
        self, request: commands_pb2.LoadWeightsRequest, context: Context
    ) -> commands_pb2.LoadWeightsResponse:
        require(request, "weights")
        return commands_pb2.LoadWeightsResponse(result=await self._accept_once(request))

    async def OpenIteration(
        self, request: commands_pb2.OpenIterationRequest, context: Context
    ) -> commands_pb2.OpenIterationResponse:
        require(request, "plan")
        check_plan(request.plan)
        return commands_pb2.OpenIterationResponse(result=await self._accept_once(request))

    async def CloseIteration(
        self, request: commands_pb2.CloseIterationRequest, context: Context
    ) -> commands_pb2.CloseIterationResponse:
        return commands_pb2.CloseIterationResponse(result=await self._accept_once(request))

    async def Evaluate(self, request: commands_pb2.EvaluateRequest, context: Context) -> commands_pb2.EvaluateResponse:
        require(request, "plan")
        return commands_pb2.EvaluateResponse(result=await self._accept_once(request))

    async def Migrate(self, request: commands_pb2.MigrateRequest, context: Context) -> commands_pb2.MigrateResponse:
        require(request, "members", "layout")
        return commands_pb2.MigrateResponse(result=await self._accept_once(request))

    async def Suspend(self, request: commands_pb2.SuspendRequest, context: Context) -> commands_pb2.SuspendResponse:
        require(request, "grants")
        return commands_pb2.SuspendResponse(result=await self._accept_once(request))

    async def Resume(self, request: commands_pb2.ResumeRequest, context: Context) -> commands_pb2.ResumeResponse:
        require(request, "grants", "layout")
        return commands_pb2.ResumeResponse(result=await self._accept_once(request))

    async def HoldTraining(
        self, request: commands_pb2.HoldTrainingRequest, context: Context
    ) -> commands_pb2.HoldTrainingResponse:
        return commands_pb2.HoldTrainingResponse(result=await self._accept_once(request))

    async def OrderGroups(
        self, request: commands_pb2.OrderGroupsRequest, context: Context
    ) -> commands_pb2.OrderGroupsResponse:
        require(request, "groups")
        return commands_pb2.OrderGroupsResponse(result=await self._accept_once(request))

    async def _accept_once(self, command: Command) -> commands_pb2.CommandResult:
        header = command.header
        require(command, "header")
        require(header, "id", "job", "lead_epoch", "term")
        check_parts(command)
        if header.job != self._job:
            return _refused(f"command {header.id} is for job {header.job!r}, this instance works for {self._job!r}")
        stored = await self._recall(header)
        if stored is not None:
            with suppress(CommandRefused):
                self._host().lead_for(header).repeated(command)
            return commands_pb2.CommandResult.FromString(stored)
        try:
            lead = self._host().lead_for(header)
            lead.check(command)
        except CommandRefused as refusal:
            return _refused(str(refusal))
        # The death of the caller cancels this call: without a task of its own, a stored command might never be taken.
        storing = asyncio.create_task(self._store_and_take(lead, command))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)
        await asyncio.shield(storing)
        return _ACCEPTED

    async def _recall(self, header: commands_pb2.CommandHeader) -> bytes | None:
        try:
            return await self._log.recall(self._job, CommandId(header.id))
        except StoreNotAdopted:
            await self._host().until_term(header.term)
            return await self._log.recall(self._job, CommandId(header.id))

    async def _store_and_take(self, lead: Lead, command: Command) -> None:
        await self._log.remember(self._job, CommandId(command.header.id), _ACCEPTED.SerializeToString())
        lead.take(command)


_ACCEPTED = commands_pb2.CommandResult(accepted=True)


def _refused(message: str) -> commands_pb2.CommandResult:
    return commands_pb2.CommandResult(accepted=False, message=message)
