"""Finds a live job's Control API through the endpoint file in the job's folder.

Invariant: an answer is about the requested job. A file that a killed run left behind is never mistaken for a live job.
[test_command: an_endpoint_without_a]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.job_credentials import SCHEDULER
from tidegate.job import JobFolder
from tidegate.json_text import parse_json, typed
from tidegate.launcher.lock import launcher_pid
from tidegate.launcher.outcome import Outcome
from tidegate.ports.rpc import PeerUnavailable
from tidegate.v1 import control_pb2, control_pb2_grpc

CALL_TIMEOUT_S = 5.0
FOLLOW_TIMEOUT_S = 30 * 24 * 3600.0
"""Every call has a deadline. This one is longer than any job, for the calls that follow a job."""


class NotRunning(LookupError):
    """The folder has no live job that answers."""


@asynccontextmanager
async def control_of(folder: JobFolder) -> AsyncIterator[control_pb2_grpc.ControlAsyncStub]:
    """A stub of the job's Control API, after a first answer. NotRunning when it gives none, then or later."""
    job = folder.root.name
    # The folder may be on a network's storage, and the caller has more to do than to wait for it.
    endpoint, tls = await asyncio.to_thread(read_endpoint, folder)
    channels = Channels(default_timeout_s=CALL_TIMEOUT_S, tls=tls)
    try:
        stub = control_pb2_grpc.ControlStub(channels.connect(endpoint, SCHEDULER))
        try:
            await stub.GetJob(control_pb2.GetJobRequest(job=job))
            yield stub
        except PeerUnavailable as error:
            raise NotRunning(await asyncio.to_thread(_why_no_answer, folder)) from error
    finally:
        await channels.close()


def read_endpoint(folder: JobFolder) -> tuple[str, Credentials]:
    """`<host>:<port>`, and the credential for it. NotRunning when there is none."""
    try:
        fields = parse_json(folder.endpoint.read_bytes())
        endpoint, credential = (typed(str, fields[name], name) for name in ("control", "credential"))
    except FileNotFoundError as error:
        raise NotRunning(_why_no_endpoint(folder)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotRunning(f"{folder.endpoint} is not an endpoint yet ({error}); try again") from error
    try:
        return endpoint, Credentials(Path(credential))
    except CertsError as error:
        raise NotRunning(_why_no_answer(folder)) from error


def _why_no_answer(folder: JobFolder) -> str:
    job = folder.root.name
    if launcher_pid(folder) is None:
        return f"job {job} does not answer: its run was killed; start it again with --resume"
    return (
        f"job {job} gave no answer: its run lives, so it is ending, its scheduler starts again, or the machine is "
        "busy; try again"
    )


def _why_no_endpoint(folder: JobFolder) -> str:
    job = folder.root.name
    if launcher_pid(folder) is not None:
        return f"job {job} is starting or ending; try again"
    if folder.result.exists():
        return f"job {job} is {Outcome.read(folder.result).end}; only a running job can do this"
    return f"job {job} is not running: its run was killed; start it again with --resume"
