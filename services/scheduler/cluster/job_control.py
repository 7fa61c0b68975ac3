"""The Control APIs of the jobs, for commands on other machines: each call goes on to the job that it names.

A job's own API listens on loopback. Who may call what is the same: the schema says it, and the listener has checked it.
A call goes on with the credential in the job's folder.

Invariants:
- All methods go on, to the job that was named and to no other folder. [test_job_control: every_method_goes_on]
- A refusal is the job's own. [test_job_control: what_a_job_refuses]
- Who may only look cannot change a job. [test_job_control: a_viewer_and_another_job]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from tidegate.adapters.grpc_server import ERROR_METADATA, Service
from tidegate.job import JobFolder
from tidegate.launcher.control import NotRunning, control_of
from tidegate.ports.rpc import PeerRefused
from tidegate.types import job_id
from tidegate.v1 import control_pb2, control_pb2_grpc

_CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]


class JobsControl(control_pb2_grpc.ControlServicer):
    """Asks the jobs whose folders are in `output_dir`. NotRunning: the named one does not answer."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir

    async def pass_on(self, method: str, request: Any, context: Any) -> Any:
        try:
            async with control_of(self._folder(request.job)) as control:
                return await getattr(control, method)(request, timeout=context.time_remaining())
        except PeerRefused as refused:
            await _abort(context, refused)

    async def pass_on_stream(self, method: str, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with control_of(self._folder(request.job)) as control:
                rows = getattr(control, method)(request, timeout=context.time_remaining())
                async for row in rows:
                    yield row
        except PeerRefused as refused:
            await _abort(context, refused)

    def _folder(self, name: str) -> JobFolder:
        """ValueError: it is no name of a job."""
        return JobFolder(self._output_dir / job_id(name))


async def _abort(context: Any, refused: PeerRefused) -> None:
    """As the job said it."""
    trailing = ((ERROR_METADATA, refused.error),) if refused.error else ()
    await context.abort(grpc.StatusCode[refused.status], refused.reason, trailing_metadata=trailing)


def jobs_control(output_dir: Path) -> Service:
    servicer = JobsControl(output_dir)  # type: ignore[abstract]  # its methods are set below
    for method in _CONTROL.methods:
        pass_on = servicer.pass_on_stream if method.server_streaming else servicer.pass_on
        setattr(servicer, method.name, partial(pass_on, method.name))
    add = partial(control_pb2_grpc.add_ControlServicer_to_server, servicer)
    return Service(_CONTROL, add, {NotRunning: grpc.StatusCode.NOT_FOUND}, for_people=True)
