"""The input of a worker's start, and the promises of every launcher.

There are two launchers: forks of a fork server (`fork_client`, CPU slots) and plain subprocesses
(`subprocess_launcher`, where a fork cannot be used).

Both keep these promises (tests/contract/test_worker_launcher.py checks each):
- The launcher calls the entry with a `WorkerChannel` on copies of the descriptors. The caller closes its own.
  [test_worker_launcher: entry_runs_with_its_channel]
- Only entries under the allowed prefixes run. [test_worker_launcher: outside_the_allowed_prefixes]
- The title of the process names what it works for, and its GPU. [test_worker_launcher: title_of_a_worker]
- Standard output and error go to the log file. [test_worker_launcher: entry_that_fails_leaves_its_traceback]
- Standard input is empty, and signals have their default actions.
  [test_worker_launcher: signals_are_reset_and_standard_input]
- A worker dies when its service dies. [test_worker_launcher: dies_when_its_service_closes]
- A worker dies when its launcher is closed. [test_worker_launcher: closing_the_launcher_kills]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tidegate.json_text import parse_json, typed
from tidegate.types import GpuId, Grant, Token

ALLOWED_PREFIXES = ("services.", "tidegate.")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class LaunchRefused(RuntimeError):
    """The launcher did not start the worker. The message says why."""


class LauncherGone(ConnectionError):
    """The fork server is dead or does not answer. Every worker that it started is gone too."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The specification of a worker.

    - `entry`: "module:function".
    - `env`: added to the launcher's environment.
    - `works_for`: the job and the role, for the title of the process.
    """

    entry: str
    grant: Grant
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    works_for: str = ""

    @property
    def title(self) -> str:
        """The title of the worker's process."""
        return f"tidegate: {self.works_for} {self.grant.gpu}"

    def to_json(self) -> str:
        return json.dumps(
            {
                "entry": self.entry,
                "gpu": self.grant.gpu,
                "term": self.grant.token.term,
                "counter": self.grant.token.counter,
                "log_path": str(self.log_path),
                "env": dict(self.env),
                "works_for": self.works_for,
            }
        )

    @classmethod
    def parse(cls, text: str | bytes) -> WorkerSpec:
        """Reads what `to_json` wrote. ValueError for any other text."""
        try:
            fields = parse_json(text)
            env = {key: typed(str, value, key) for key, value in typed(dict, fields["env"], "env").items()}
            token = Token(typed(int, fields["term"], "term"), typed(int, fields["counter"], "counter"))
            return cls(
                entry=typed(str, fields["entry"], "entry"),
                grant=Grant(GpuId(typed(str, fields["gpu"], "gpu")), token),
                log_path=Path(typed(str, fields["log_path"], "log_path")),
                env=env,
                works_for=typed(str, fields["works_for"], "works_for"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a worker's specification: {error}") from error


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """The descriptors for a worker.

    - `channel`: the worker's end of the channel.
    - `holds`: the socket in whose queue the lock of its GPU lies.
    - `store_listener`: a listening socket for a torch store.
    """

    channel: int
    holds: int
    store_listener: int

    def in_order(self) -> tuple[int, int, int]:
        return (self.channel, self.holds, self.store_listener)


class WorkerProcess:
    """A started worker, seen through its pidfd. A holder of the pidfd never signals another process of the same pid."""

    def __init__(self, pid: int, pidfd: int, status: Callable[[], Awaitable[int | None]]) -> None:
        """Takes over `pidfd`. `status` gives the exit status of the dead process, None when it cannot be known."""
        self.pid = pid
        self._pidfd = pidfd
        self._status = status
        self._ended = asyncio.create_task(self._watch(), name=f"worker-{pid}")

    async def wait(self) -> int | None:
        """Waits for the death. Returns the exit status (negative: the signal), None when it cannot be known."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Does nothing when the process is dead."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _watch(self) -> int | None:
        try:
            await until_readable(self._pidfd)
            return await self._status()
        finally:
            os.close(self._pidfd)


class WorkerLauncher(Protocol):
    """Starts worker processes on this node."""

    async def launch(self, spec: WorkerSpec, fds: WorkerFds) -> WorkerProcess:
        """Starts a process, which may still be importing when this returns. LaunchRefused or LauncherGone."""
        ...

    async def close(self) -> None:
        """Kills the workers that it started. Closing twice is harmless."""
        ...


def check_entry(entry: str, allowed: Sequence[str]) -> None:
    """ValueError unless `entry` is "module:function" in a module under one of the prefixes."""
    if not _ENTRY.fullmatch(entry):
        raise ValueError(f"worker entry {entry!r} is not module:function")
    if not entry.startswith(tuple(allowed)):
        raise ValueError(f"worker entry {entry!r} is not under {', '.join(allowed)}; start the launcher with --allow")


def resolve(entry: str) -> Callable[..., Any]:
    """The function that "module:function" names. Imports its module."""
    module, _, function = entry.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{entry} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return] # only that it is callable can be known


async def until_readable(fd: int) -> None:
    """Returns when the descriptor is readable: it has data or a connection, or the process of a pidfd has ended."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
