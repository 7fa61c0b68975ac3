"""A launcher over fork servers that come and go: it finds the one that listens now."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.runtime.nodes import fork_server, spec, worker_fds
from tidegate.runtime.channel import AsyncChannel
from tidegate.runtime.launch import LauncherGone, LaunchRefused
from tidegate.runtime.reconnecting_launcher import ReconnectingLauncher
from tidegate.v1 import workers_pb2 as wire

PATIENCE_S = 20.0


async def answer_of_a_new_worker(launcher: ReconnectingLauncher, folder: Path) -> str:
    """The process id that a new worker reports."""
    with worker_fds() as (ours, fds):
        worker = await launcher.launch(spec("echo", folder / "log"), fds)
    channel = await AsyncChannel.open(ours, wire.WorkerReply)
    try:
        assert (await channel.receive()).call_id == 0
        await channel.send(wire.WorkerCall(call_id=1, start_engine=wire.StartEngine(config_json="pid")))
        pid = (await channel.receive()).started.detail
    finally:
        channel.close()
        await worker.wait()
    assert pid == str(worker.pid)
    return pid


async def test_after_the_fork_server_was_restarted_workers_start_on_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    launcher = ReconnectingLauncher(path, timeout_s=PATIENCE_S)
    try:
        with fork_server(path) as first:
            await answer_of_a_new_worker(launcher, tmp_path)
            await answer_of_a_new_worker(launcher, tmp_path)
            first.send_signal(signal.SIGKILL)
            first.wait()
            with fork_server(path):
                await answer_of_a_new_worker(launcher, tmp_path)
    finally:
        await launcher.close()


async def test_a_refused_launch_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    launcher = ReconnectingLauncher(path, timeout_s=PATIENCE_S)
    try:
        with fork_server(path), worker_fds() as (_, fds), pytest.raises(LaunchRefused):
            await launcher.launch(replace(spec("echo", tmp_path / "log"), entry="os:getpid"), fds)
    finally:
        await launcher.close()


async def test_without_a_fork_server_the_launch_fails_with_the_path(tmp_path: Path) -> None:
    launcher = ReconnectingLauncher(tmp_path / "fork.sock", timeout_s=0.0)
    with (
        worker_fds() as (_, fds),
        pytest.raises(LauncherGone, match=r"no fork server listens at .*fork.sock after 0 s"),
    ):
        await launcher.launch(spec("echo", tmp_path / "log"), fds)
    await launcher.close()
