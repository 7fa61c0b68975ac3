"""Runs a test's function in N forked rank processes, from a server that has imported torch and megatron once.

`python -m tests.ranks` is the server. It reads one JSON call a line from its input, makes a listening loopback socket,
forks the ranks, and answers one JSON line. A rank calls `target(RankContext, **arguments)`. The call returns a dict of
arrays, which the rank leaves in an .npz file.

- A rank that fails ends the others at once.
- A call past its timeout is killed.
- When the input closes, the server and everything that it forked are gone.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.runtime.large_copies import with_large_copies

Results = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's place and how it meets the others. `listen_fd` is rank 0's socket.

    `tmpfs` is a folder of the host's shared memory that all ranks of the call share. It is removed afterwards.
    """

    rank: int
    world_size: int
    port: int
    listen_fd: int | None
    timeout_s: float
    tmpfs: Path


class RankServer:
    """The test's end of the server."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | with_large_copies(os.environ),
        )

    def run(
        self,
        target: str,
        world_size: int,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        expect_death: Sequence[int] = (),
    ) -> list[Results]:
        """The return value of each rank. RuntimeError with the traceback of the first rank that failed.

        A rank in `expect_death` must be killed by SIGKILL, and returns {}.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with (
            tempfile.TemporaryDirectory(prefix="tidegate-test-") as folder,
            tempfile.TemporaryDirectory(prefix="tidegate-test-", dir="/dev/shm") as tmpfs,
        ):
            call = {
                "target": target,
                "world_size": world_size,
                "arguments": dict(arguments or {}),
                "timeout_s": timeout_s,
                "folder": folder,
                "tmpfs": tmpfs,
                "expect_death": list(expect_death),
            }
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            error = json.loads(line)["error"] if line else "the server of ranks has ended"
            if error:
                raise RuntimeError(f"{target} on {world_size} ranks: {error}")
            return [{} if rank in expect_death else _read(Path(folder) / f"{rank}.npz") for rank in range(world_size)]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@contextmanager
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    try:
        yield server
    finally:
        server.close()


def _read(path: Path) -> Results:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _serve() -> None:
    warnings.simplefilter("ignore")
    import torch

    from tidegate.megatron import cpu_stand_in

    torch.set_num_threads(1)
    # torch warns at every model that it builds, of things that no test can change.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    cpu_stand_in.install()
    importlib.import_module("services.actor.trainer")
    for line in sys.stdin:
        print(json.dumps({"error": _run_ranks(json.loads(line))}), flush=True)


def _run_ranks(call: dict[str, Any]) -> str:
    """Returns the first failure's text, or ""."""
    from tidegate.elastic.epoch.rendezvous import listening_socket

    module, _, name = call["target"].partition(":")
    target = getattr(importlib.import_module(module), name)
    server = listening_socket()
    ranks: dict[int, int] = {}
    for rank in range(call["world_size"]):
        pid = os.fork()
        if pid == 0:
            port = server.getsockname()[1]
            listen_fd = server.detach()
            if rank != 0:
                os.close(listen_fd)
            context = RankContext(
                rank=rank,
                world_size=call["world_size"],
                port=port,
                listen_fd=listen_fd if rank == 0 else None,
                timeout_s=call["timeout_s"],
                tmpfs=Path(call["tmpfs"]),
            )
            _be_rank(context, target, call)
        ranks[os.pidfd_open(pid)] = rank
    server.close()
    return _await(
        ranks,
        Path(call["folder"]),
        deadline=time.monotonic() + call["timeout_s"],
        expect_death=frozenset(call["expect_death"]),
    )


def _be_rank(context: RankContext, target: Any, call: dict[str, Any]) -> None:
    status = 1
    try:
        results = target(context, **call["arguments"])
        np.savez(Path(call["folder"]) / f"{context.rank}.npz", **results)
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into the server's loop
        (Path(call["folder"]) / f"{context.rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _await(ranks: dict[int, int], folder: Path, *, deadline: float, expect_death: frozenset[int]) -> str:
    error = ""
    poll = select.poll()
    for pidfd in ranks:
        poll.register(pidfd, select.POLLIN)
    while ranks:
        ended = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
        if not ended and not error:
            error = f"ranks {sorted(ranks.values())} had not ended at the timeout"
        for pidfd, _ in ended:
            rank = ranks.pop(pidfd)
            status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            poll.unregister(pidfd)
            os.close(pidfd)
            want = int(signal.SIGKILL) if rank in expect_death else 0
            if status is not None and status.si_status != want and not error:
                text = folder / f"{rank}.error"
                error = f"rank {rank}: " + (text.read_text() if text.exists() else f"exit {status.si_status}")
        if error:
            for pidfd in ranks:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            deadline = time.monotonic() + 10.0
    return error


if __name__ == "__main__":
    _serve()
