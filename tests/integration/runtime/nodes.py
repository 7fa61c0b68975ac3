"""Real fork servers and descriptors for the tests of the runtime."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.runtime.launch import WorkerFds, WorkerSpec
from tidegate.types import GpuId, Grant, Token

ENTRIES = "tests.integration.runtime.entries"


def grant(gpu: str = "n0/0", counter: int = 1) -> Grant:
    return Grant(GpuId(gpu), Token(1, counter))


def spec(entry: str, log_path: Path, **env: str) -> WorkerSpec:
    return WorkerSpec(entry=f"{ENTRIES}:{entry}", grant=grant(), log_path=log_path, env=env)


@contextmanager
def fork_server(path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fork server that may run the tests' entries; killed at the end if it still runs."""
    command = [sys.executable, "-m", "tidegate.runtime.forkserver", "--socket", str(path), "--allow", "tests."]
    with subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def worker_fds() -> Iterator[tuple[socket.socket, WorkerFds]]:
    """The service's end of a channel, and the descriptors to start its worker with; closed here afterwards."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    hold = os.open(os.devnull, os.O_RDWR)
    try:
        yield ours, WorkerFds(theirs.fileno(), hold, listener.fileno())
    finally:
        theirs.close()
        listener.close()
        os.close(hold)
