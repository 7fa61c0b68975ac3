"""The contract of worker launchers, for the fork server and for plain subprocesses."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.integration.runtime.nodes import fork_server, grant, spec, worker_fds
from tidegate.gate import Gate
from tidegate.runtime.channel import AsyncChannel, ChannelClosed
from tidegate.runtime.fork_client import ForkServerLauncher
from tidegate.runtime.launch import LaunchRefused, WorkerFds, WorkerLauncher, WorkerProcess, WorkerSpec
from tidegate.runtime.local_worker import hand_over
from tidegate.runtime.subprocess_launcher import SubprocessLauncher
from tidegate.v1 import workers_pb2 as wire

Channel = AsyncChannel[wire.WorkerReply]


@pytest.fixture(scope="module")
def fork_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Use a path longer than a Unix socket's address: a node's folder may be anywhere.
    folder = tmp_path_factory.mktemp("node") / ("long" * 30)
    folder.mkdir()
    with fork_server(folder / "fork.sock"):
        yield folder / "fork.sock"


@pytest.fixture(params=["fork server", "subprocess"])
async def launcher(request: pytest.FixtureRequest, fork_socket: Path) -> AsyncIterator[WorkerLauncher]:
    opened: WorkerLauncher
    if request.param == "fork server":
        opened = await ForkServerLauncher.connect(fork_socket, timeout_s=20)
    else:
        opened = SubprocessLauncher(allow=["tests."])
    yield opened
    await opened.close()


@asynccontextmanager
async def started(launcher: WorkerLauncher, wanted: WorkerSpec) -> AsyncIterator[tuple[WorkerProcess, Channel]]:
    with worker_fds() as (ours, fds):
        worker = await launcher.launch(wanted, fds)
    channel = await AsyncChannel.open(ours, wire.WorkerReply)
    try:
        yield worker, channel
    finally:
        channel.close()
        await worker.wait()


async def asked(channel: Channel, what: str) -> str:
    """The echo worker's report about itself, once it is ready."""
    assert (await channel.receive()).call_id == 0
    await channel.send(wire.WorkerCall(call_id=1, start_engine=wire.StartEngine(config_json=what)))
    return (await channel.receive()).started.detail


async def test_the_entry_runs_with_its_channel_its_environment_and_its_log(
    launcher: WorkerLauncher, tmp_path: Path
) -> None:
    async with started(launcher, spec("echo", tmp_path / "log", COLOUR="blue")) as (_, channel):
        assert await asked(channel, "COLOUR") == "blue"
        assert (tmp_path / "log").read_text() == "echo n0/0 is here\n"


async def test_the_title_of_a_worker_names_its_job_its_role_and_its_gpu(
    launcher: WorkerLauncher, tmp_path: Path
) -> None:
    async with started(launcher, spec("echo", tmp_path / "log", COLOUR="blue")) as (worker, channel):
        assert await asked(channel, "COLOUR") == "blue"
        assert "".join(psutil.Process(worker.pid).cmdline()) == "tidegate: demo actor n0/0"


async def test_signals_are_reset_and_standard_input_is_empty(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with started(launcher, spec("echo", tmp_path / "log")) as (_, channel):
        assert await asked(channel, "signals") == "[True, True, True]"
    async with started(launcher, spec("echo", tmp_path / "log")) as (_, channel):
        assert await asked(channel, "stdin") == "''"


async def test_a_worker_has_its_own_descriptors_and_no_others(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with (
        started(launcher, spec("echo", tmp_path / "log")),
        started(launcher, spec("echo", tmp_path / "log")) as (_, channel),
    ):
        kinds = ast.literal_eval(await asked(channel, "fds"))
    # The descriptors: standard input; the log twice; the channel twice (once for the watcher); the holds; the listener.
    assert [kind for kind in kinds if not kind.startswith("/proc")] == [
        "/dev/null",
        str(tmp_path / "log"),
        str(tmp_path / "log"),
        "socket",
        "socket",
        "socket",
        "socket",
    ]


async def test_two_workers_draw_different_random_numbers(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with (
        started(launcher, spec("echo", tmp_path / "log")) as (_, first),
        started(launcher, spec("echo", tmp_path / "log")) as (_, second),
    ):
        assert await asked(first, "random") != await asked(second, "random")


async def test_the_exit_status_of_a_worker_is_reported(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with started(launcher, spec("leave", tmp_path / "log", LEAVE_WITH="7")) as (worker, _):
        assert await worker.wait() == 7


async def test_an_entry_that_fails_leaves_its_traceback_in_the_log(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with started(launcher, spec("fail", tmp_path / "log")) as (worker, channel):
        assert await worker.wait() == 1
        with pytest.raises(ChannelClosed):
            await channel.receive()
    assert "RuntimeError: it went wrong on purpose" in (tmp_path / "log").read_text()


async def test_a_killed_worker_is_seen_with_its_signal(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with started(launcher, spec("echo", tmp_path / "log")) as (worker, channel):
        await channel.receive()
        os.kill(worker.pid, signal.SIGKILL)
        assert await worker.wait() == -signal.SIGKILL
        worker.kill()


async def test_a_worker_dies_when_its_service_closes_the_channel_while_it_works(
    launcher: WorkerLauncher, tmp_path: Path
) -> None:
    async with started(launcher, spec("echo", tmp_path / "log")) as (worker, channel):
        await channel.receive()
        await channel.send(wire.WorkerCall(call_id=1, save=wire.Save()))
        channel.close()
        assert await worker.wait() == 70


async def test_closing_the_launcher_kills_its_workers(launcher: WorkerLauncher, tmp_path: Path) -> None:
    async with started(launcher, spec("echo", tmp_path / "log")) as (worker, channel):
        await channel.receive()
        await launcher.close()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        assert await worker.wait() in (-signal.SIGKILL, None)


async def test_a_gpu_is_held_for_exactly_as_long_as_the_worker_lives(launcher: WorkerLauncher, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    ours, theirs = socket.socketpair()
    given, holds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fds = WorkerFds(theirs.fileno(), holds.fileno(), listener.fileno())
        worker = await launcher.launch(spec("echo", tmp_path / "log"), fds)
    theirs.close()
    holds.close()
    hand_over(gate.acquire(grant()), given)
    given.close()
    assert gate.is_held(grant().gpu)
    worker.kill()
    await worker.wait()
    assert await asyncio.to_thread(gate.wait_until_free, grant().gpu, timeout_s=60)
    ours.close()


@pytest.mark.parametrize("entry", ["os:getcwd", "tidegate", "tidegate.types:job_id()", "services:main"])
async def test_entries_outside_the_allowed_prefixes_are_refused(
    launcher: WorkerLauncher, tmp_path: Path, entry: str
) -> None:
    with worker_fds() as (ours, fds), pytest.raises(LaunchRefused, match="worker entry"):
        await launcher.launch(replace(spec("echo", tmp_path / "log"), entry=entry), fds)
    ours.close()
