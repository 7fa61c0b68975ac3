"""What a worker is started from, and what every way of starting one promises.

Two launchers: forks of a fork server (`fork_client`, CPU slots) and plain subprocesses (`subprocess_launcher`, where a
fork cannot be used). What both promise (tests/contract/test_worker_launcher.py asks it of each):
- the entry is called with a `WorkerChannel` on the descriptors given; these are copied, the caller closes its own;
- only entries under the allowed prefixes run;
- standard output and error go to the log file, standard input is empty, signals have their default actions;
- a worker dies when its service dies, and when its launcher is closed.
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

from tidegate.types import GpuId, Grant, Token

ALLOWED_PREFIXES = ("services.", "tidegate.")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class LaunchRefused(RuntimeError):
    """The launcher did not start the worker; the message says why."""


class LauncherGone(ConnectionError):
    """The fork server is dead or does not answer, and with it every worker it started."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`entry` is "module:function"; `env` is added to the environment of the launcher."""

    entry: str
    grant: Grant
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "entry": self.entry,
                "gpu": self.grant.gpu,
                "term": self.grant.token.term,
                "counter": self.grant.token.counter,
                "log_path": str(self.log_path),
                "env": dict(self.env),
            }
        )

    @classmethod
    def parse(cls, text: str | bytes) -> WorkerSpec:
        """Inverse of `to_json`; ValueError on anything else."""
        try:
            fields = json.loads(text)
            env = {_typed(str, key): _typed(str, value) for key, value in _typed(dict, fields["env"]).items()}
            token = Token(_typed(int, fields["term"]), _typed(int, fields["counter"]))
            return cls(
                entry=_typed(str, fields["entry"]),
                grant=Grant(GpuId(_typed(str, fields["gpu"])), token),
                log_path=Path(_typed(str, fields["log_path"])),
                env=env,
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a worker's specification: {error}") from error


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """Descriptors for a worker: its end of the channel, the socket in whose queue its GPU's lock lies, a listening
    socket for a torch store."""

    channel: int
    holds: int
    store_listener: int

    def in_order(self) -> tuple[int, int, int]:
        return (self.channel, self.holds, self.store_listener)


class WorkerProcess:
    """A started worker, seen through its pidfd: whoever holds one never signals another process of the same number."""

    def __init__(self, pid: int, pidfd: int, status: Callable[[], Awaitable[int | None]]) -> None:
        """Takes `pidfd` over. `status` gives the exit status once the process is dead, None when it cannot be known."""
        self.pid = pid
        self._pidfd = pidfd
        self._status = status
        self._ended = asyncio.create_task(self._watch(), name=f"worker-{pid}")

    async def wait(self) -> int | None:
        """The exit status (negative: the signal), None when nobody could tell it; returns once the process is dead."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Nothing happens when it is dead."""
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
        """The process, which may still be importing. Raises LaunchRefused or LauncherGone."""
        ...

    async def close(self) -> None:
        """Kills the workers that it started; idempotent."""
        ...


def check_entry(entry: str, allowed: Sequence[str]) -> None:
    """ValueError unless `entry` is "module:function" in a module under one of the prefixes."""
    if not _ENTRY.fullmatch(entry):
        raise ValueError(f"worker entry {entry!r} is not module:function")
    if not entry.startswith(tuple(allowed)):
        raise ValueError(f"worker entry {entry!r} is not under {', '.join(allowed)}; start the launcher with --allow")


def resolve(entry: str) -> Callable[..., Any]:
    """The function that "module:function" names, its module imported."""
    module, _, function = entry.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{entry} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return] # callable is all that can be known of it


async def until_readable(fd: int) -> None:
    """Returns when the descriptor is readable: data, a connection, or for a pidfd the end of its process."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


def _typed(kind: type[Any], value: object) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value
