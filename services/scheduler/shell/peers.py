"""The scheduler's calls to other processes: commands to leads, questions to gates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.scheduler.shell.requests import Request
from services.scheduler.state.cluster_state import ClusterState
from tidegate.adapters.grpc_client import Channels
from tidegate.certs.identity import Identity
from tidegate.codec import WireError, decode_gate_state
from tidegate.gate import GateState
from tidegate.ownership.adoption import GateReports
from tidegate.ports.rpc import PeerRefused
from tidegate.types import NodeId
from tidegate.v1 import commands_pb2, commands_pb2_grpc, instance_pb2, instance_pb2_grpc

GATE_TIMEOUT_S = 2.0
"""A gate reads files of its own node. Adoption waits for all gates, so a gate that hangs counts as unreachable."""


class Peers:
    """`job`: who answers for a lead or a gate."""

    def __init__(self, channels: Channels, job: Identity) -> None:
        self._channels = channels
        self._job = job

    async def send(self, endpoint: str, request: Request, timeout_s: float) -> commands_pb2.CommandResult:
        """The lead's answer. A refusal is an answer too. PeerUnavailable: the lead did not answer."""
        stub = commands_pb2_grpc.ComponentStub(self._channels.connect(endpoint, self._job))
        try:
            return await self._call(stub, request, timeout_s)
        except PeerRefused as refusal:
            return commands_pb2.CommandResult(accepted=False, message=str(refusal))

    async def ask_gate(self, endpoint: str, timeout_s: float) -> instance_pb2.GateReportResponse:
        """The gate's report. PeerUnavailable or PeerRefused: there is no report."""
        stub = instance_pb2_grpc.InstanceStub(self._channels.connect(endpoint, self._job))
        report = await stub.GateReport(instance_pb2.GateReportRequest(), timeout=timeout_s)
        try:
            _gate_states(report)
        except WireError as error:
            message = f"the report of the gate at {endpoint} is damaged: {error}"
            raise PeerRefused(message, reason=str(error), status="DATA_LOSS", error=type(error).__name__) from error
        return report

    async def gate_reports(self, state: ClusterState | None) -> GateReports:
        """The reports of all nodes that have a living instance, without the nodes that do not answer."""
        living = [each for each in state.instances.values() if each.living and each.endpoint] if state else []
        asked = [self.ask_gate(each.endpoint, GATE_TIMEOUT_S) for each in living]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            NodeId(answer.node): _gate_states(answer)
            for answer in answers
            if isinstance(answer, instance_pb2.GateReportResponse)
        }

    async def _call(
        self, stub: commands_pb2_grpc.ComponentAsyncStub, request: Request, timeout_s: float
    ) -> commands_pb2.CommandResult:
        match request:
            case commands_pb2.ScaleUpRequest():
                return (await stub.ScaleUp(request, timeout=timeout_s)).result
            case commands_pb2.ScaleDownRequest():
                return (await stub.ScaleDown(request, timeout=timeout_s)).result
            case commands_pb2.MigrateRequest():
                return (await stub.Migrate(request, timeout=timeout_s)).result
            case commands_pb2.LoadWeightsRequest():
                return (await stub.LoadWeights(request, timeout=timeout_s)).result
            case commands_pb2.OpenIterationRequest():
                return (await stub.OpenIteration(request, timeout=timeout_s)).result
            case commands_pb2.CloseIterationRequest():
                return (await stub.CloseIteration(request, timeout=timeout_s)).result
            case commands_pb2.EvaluateRequest():
                return (await stub.Evaluate(request, timeout=timeout_s)).result
            case commands_pb2.SuspendRequest():
                return (await stub.Suspend(request, timeout=timeout_s)).result
            case commands_pb2.ResumeRequest():
                return (await stub.Resume(request, timeout=timeout_s)).result
            case commands_pb2.HoldTrainingRequest():
                return (await stub.HoldTraining(request, timeout=timeout_s)).result
            case commands_pb2.OrderGroupsRequest():
                return (await stub.OrderGroups(request, timeout=timeout_s)).result


def _gate_states(report: instance_pb2.GateReportResponse) -> Sequence[GateState]:
    """WireError: the report is damaged."""
    return [decode_gate_state(each) for each in report.gpus]
