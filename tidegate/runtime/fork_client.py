"""The service's side of the fork server: requests workers and receives the reports of their ends.

The connection is the service's life line: when it closes, the fork server kills the workers requested on it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from pathlib import Path
from typing import Any

from tidegate.runtime.forkserver import MAX_REQUEST_BYTES
from tidegate.runtime.launch import LauncherGone, LaunchRefused, WorkerFds, WorkerProcess, WorkerSpec
from tidegate.runtime.unix_socket import connect_to

_RETRY_S = 0.02
_ANSWER_BYTES = 64 * 1024
_STATUS_GRACE_S = 2.0
"""The time between the kernel's report that a worker is dead and the fork server's report of its status.

The fork server needs one round of its loop.
"""


class ForkServerLauncher:
    """Forks workers of a running fork server."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over a connected socket. `connect` makes one."""
        self._connection = connection
        self._connection.setblocking(False)
        self._ids = itertools.count(1)
        self._requests: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)
        self._is_open = True

    @classmethod
    async def connect(cls, path: Path, *, timeout_s: float) -> ForkServerLauncher:
        """Waits for the server to finish its imports. LauncherGone when no server listens at `path` by then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                return cls(connect_to(path))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if loop.time() >= deadline:
                    raise LauncherGone(
                        f"no fork server listens at {path} after {timeout_s:g} s ({error}); see its log for why"
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def launch(self, spec: WorkerSpec, fds: WorkerFds) -> WorkerProcess:
        request_id = next(self._ids)
        request = f"{request_id}\n{spec.to_json()}".encode()
        if len(request) > MAX_REQUEST_BYTES:
            raise LaunchRefused(f"a specification of {len(request)} bytes is over the limit of {MAX_REQUEST_BYTES}")
        if not self._is_open:
            raise LauncherGone("the fork server is gone; start it again")
        answer: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._requests[request_id] = answer
        try:
            await self._send(request, fds)
            pid, pidfd = await answer
        finally:
            self._requests.pop(request_id, None)
        return WorkerProcess(pid, pidfd, lambda: self._status(pid))

    async def close(self) -> None:
        self._disconnect("this launcher was closed")

    async def _send(self, request: bytes, fds: WorkerFds) -> None:
        while True:
            try:
                socket.send_fds(self._connection, [request], fds.in_order())
                return
            except BlockingIOError:
                await asyncio.sleep(_RETRY_S)
            except OSError as error:
                self._disconnect(str(error))
                raise LauncherGone(f"the fork server is gone: {error}") from error

    async def _status(self, pid: int) -> int | None:
        try:
            return await asyncio.wait_for(self._statuses[pid], _STATUS_GRACE_S)
        except (TimeoutError, LauncherGone):
            return None
        finally:
            del self._statuses[pid]

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._connection, _ANSWER_BYTES, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._disconnect(str(error))
            return
        if not data:
            self._disconnect("it closed the connection")
            return
        self._take(json.loads(data), fds)

    def _take(self, answer: dict[str, Any], fds: list[int]) -> None:
        if "status" in answer:
            status = self._statuses.get(answer["pid"])
            if status is not None and not status.done():
                status.set_result(answer["status"])
            return
        request = self._requests.get(answer["id"])
        if "refused" in answer:
            if request is not None and not request.done():
                request.set_exception(LaunchRefused(answer["refused"]))
            return
        # Make the future now: the status may be the very next packet, before the requesting task runs again.
        self._statuses[answer["pid"]] = self._loop.create_future()
        process = (answer["pid"], fds[0])
        if request is not None and not request.done():
            request.set_result(process)
        else:
            WorkerProcess(*process, lambda: self._status(process[0])).kill()

    def _disconnect(self, why: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._connection)
        self._connection.close()
        gone = LauncherGone(f"the fork server is gone: {why}")
        for request in self._requests.values():
            if not request.done():
                request.set_exception(gone)
        for status in self._statuses.values():
            if not status.done():
                status.set_exception(gone)
                # Mark it as read: only a task that waits for that worker reads it, and there may be none.
                status.exception()
