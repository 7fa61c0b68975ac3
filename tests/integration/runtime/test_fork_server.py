"""The fork server's own promises: which processes it outlives, which it ends with itself, which requests it takes."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runtime.nodes import fork_server, spec, worker_fds
from tidegate.runtime.channel import BlockingChannel
from tidegate.runtime.fork_client import ForkServerLauncher
from tidegate.runtime.launch import LauncherGone
from tidegate.v1 import workers_pb2 as wire

OWNER = """
import subprocess, sys
server = subprocess.Popen([sys.executable, "-m", "tidegate.runtime.forkserver", *sys.argv[1:]])
print(server.pid, flush=True)
sys.stdin.read()
"""
WAIT_S = 20


async def connect(path: Path) -> ForkServerLauncher:
    return await ForkServerLauncher.connect(path, timeout_s=WAIT_S)


@contextmanager
def watched(pid: int) -> Iterator[int]:
    """A pidfd of the process."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], WAIT_S)[0])


async def test_only_its_user_can_reach_the_fork_server(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    with fork_server(path):
        launcher = await connect(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await launcher.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_workers_die_with_the_fork_server(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "fork.sock"
    with fork_server(path) as server:
        launcher = await connect(path)
        with worker_fds() as (ours, fds):
            worker = await launcher.launch(spec("echo", tmp_path / "log"), fds)
        server.send_signal(number)
        assert await worker.wait() in (-signal.SIGKILL, None)
        assert server.wait(WAIT_S) == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        assert path.exists() == (number is signal.SIGKILL)
        with worker_fds() as (unused, fds):
            unused.close()
            with pytest.raises(LauncherGone):
                await launcher.launch(spec("echo", tmp_path / "log"), fds)
        await launcher.close()
        ours.close()


async def test_a_fork_server_dies_with_its_owner_and_ends_its_workers(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    owner = subprocess.Popen(  # noqa: ASYNC220 # nothing else runs on this loop
        [sys.executable, "-c", OWNER, "--socket", str(path), "--allow", "tests."],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    server_pid = int(owner.stdout.readline())
    launcher = await connect(path)
    with worker_fds() as (ours, fds):
        worker = await launcher.launch(spec("echo", tmp_path / "log"), fds)
    with watched(server_pid) as server:
        owner.kill()
        owner.communicate()
        assert ends(server)
    await worker.wait()
    await launcher.close()
    ours.close()


async def test_the_death_of_a_service_ends_its_own_workers_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    with fork_server(path):
        dying, living = await connect(path), await connect(path)
        with worker_fds() as (one, fds):
            doomed = await dying.launch(spec("echo", tmp_path / "log"), fds)
        with worker_fds() as (other, fds):
            spared = await living.launch(spec("echo", tmp_path / "log"), fds)
        await dying.close()
        await doomed.wait()
        channel = BlockingChannel(other, wire.WorkerReply)
        assert channel.receive(WAIT_S) is not None
        channel.send(wire.WorkerCall(call_id=1, stop=wire.Stop()))
        assert await spared.wait() == 0
        await living.close()
        one.close()
        other.close()


def test_bad_requests_are_refused_and_the_fork_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    with fork_server(path) as server:
        connection = raw_connection(path, server)
        for request in (b"", b"x", b"1\n[]", b"2\n{}", b"3\n\xff", b"4\n" + b"[" * 100_000):
            if request:
                connection.send(request)
                answer: dict[str, Any] = json.loads(connection.recv(65536))
                assert answer["refused"]
        with worker_fds() as (ours, fds):
            for text in (b"[]", b'{"entry": 3}', b"null", b"[" * 100_000):
                socket.send_fds(connection, [b"7\n" + text], fds.in_order())
                assert "not a worker's specification" in json.loads(connection.recv(65536))["refused"]
            ours.close()
        assert server.poll() is None
        connection.close()


def raw_connection(path: Path, server: subprocess.Popen[bytes]) -> socket.socket:
    while server.poll() is None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            select.select([], [], [], 0.01)
            continue
        return connection
    raise AssertionError(f"the fork server ended with {server.returncode}")


def test_a_preload_that_starts_a_thread_is_refused(tmp_path: Path) -> None:
    entry = "tests.integration.runtime.entries:start_a_thread"
    command = [sys.executable, "-m", "tidegate.runtime.forkserver", "--socket", str(tmp_path / "s"), "--preload", entry]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert ended.returncode == 1
    assert "2 threads run after preloading" in ended.stderr


async def test_workers_forked_with_torch_compute_and_die_with_their_service_inside_a_collective(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    with fork_server(path, "--preload", "torch,torch.distributed"), ExitStack() as open_ends:
        launcher = await connect(path)
        processes, channels = [], []
        with worker_fds() as (first, fds), worker_fds() as (second, other_fds):
            port = str(port_of(fds.store_listener))
            for rank, (ours, given) in enumerate([(first, fds), (second, other_fds)]):
                wanted = spec("blocked_collective", tmp_path / f"log{rank}", RANK=str(rank), STORE_PORT=port)
                processes.append(await launcher.launch(wanted, given))
                channels.append(BlockingChannel(open_ends.enter_context(ours), wire.WorkerReply))
        for rank, channel in enumerate(channels):
            assert channel.receive(WAIT_S) is not None, (tmp_path / f"log{rank}").read_text()
        # Rank 0 waits in the collective, which the death of rank 1 would end by itself.
        first.close()
        second.close()
        assert [await process.wait() for process in processes] == [70, 70]
        want = "gradient [2.0, 4.0] with 1 thread, imported before the fork\n"
        assert [(tmp_path / f"log{rank}").read_text() for rank in range(2)] == [want, want]
        await launcher.close()


def port_of(listener: int) -> int:
    with socket.socket(fileno=os.dup(listener)) as copy:
        return int(copy.getsockname()[1])
