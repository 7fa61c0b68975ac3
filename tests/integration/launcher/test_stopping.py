"""However and whenever a run is stopped, nothing of it remains, and it says how to go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.launcher.launched import Launched, assert_nothing_is_left, processes_of, wait_until_gone
from tidegate.config.job_config import JobConfig
from tidegate.events import EventSource
from tidegate.launcher.outcome import End, Outcome
from tidegate.runtime.service import connect_bus
from tidegate.types import JobId
from tidegate.v1 import events_pb2

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launches in the test's folder. After a failing test the rest is killed, the launcher first."""
    yield lambda *arguments, **changes: Launched(tmp_path, *arguments, **changes)
    left = processes_of(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


SHORT = {"iterations": 2, "prompts_per_iteration": 2, "group_size": 2, "max_new_tokens": 60}

MOMENTS = {
    "Ctrl-C while the servers start": ("NATS and Redis", signal.SIGINT, 130),
    "SIGTERM while the services start": ("fork servers and services", signal.SIGTERM, 143),
    "a closed terminal in mid-job": ('"phase": "generate"', signal.SIGHUP, 129),
}


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=pytest.mark.long if "mid-job" in each else ()) for each in MOMENTS]
)
def test_a_signal_leaves_nothing_behind_and_says_how_to_go_on(moment: str, launch: Launch) -> None:
    says, number, want = MOMENTS[moment]
    launched = launch()
    launched.until_it_says(says)
    launched.send(number)
    assert launched.ended() == want
    assert f"stopped by {number.name}; go on with it: tidegate run" in launched.said
    assert "--resume" in launched.said
    assert "Traceback" not in launched.said
    assert_nothing_is_left(launched)
    assert Outcome.read(launched.job_folder().result).end is End.INTERRUPTED
    assert launched.job_folder().attempt().trace.exists()


def test_everything_dies_with_a_launcher_that_is_killed_and_the_job_can_be_resumed(launch: Launch) -> None:
    launched = launch()
    launched.until_it_says('"phase": "starting"')
    pids = list(processes_of(launched.folder))
    assert len(pids) >= 7, "launcher, two servers, a fork server, a scheduler and three instances"
    launched.send(signal.SIGKILL)
    assert launched.ended() == -signal.SIGKILL
    wait_until_gone(pids)
    assert processes_of(launched.folder) == {}
    again = launch("--resume")
    again.until_it_says("fork servers and services")
    again.send(signal.SIGINT)
    assert again.ended() == 130
    assert_nothing_is_left(again)


@pytest.mark.parametrize("server", ["valkey", "nats-server"])
def test_the_death_of_a_server_stops_everything_with_a_message(server: str, launch: Launch) -> None:
    launched = launch()
    launched.until_it_says("fork servers and services")
    (pid,) = [pid for pid, command in processes_of(launched.folder).items() if f"/{server}" in command.split()[0]]
    os.kill(pid, signal.SIGKILL)
    assert launched.ended() == 1
    assert f"the embedded {server} died" in launched.said
    assert "go on with it: tidegate run" in launched.said
    assert_nothing_is_left(launched)


@pytest.mark.long
def test_a_service_that_dies_is_started_again(launch: Launch) -> None:
    launched = launch()
    launched.until_it_says("fork servers and services")
    launched.until_it_says('"phase": "starting"')
    (pid,) = [pid for pid, command in processes_of(launched.folder).items() if "services.scheduler" in command]
    os.kill(pid, signal.SIGKILL)
    launched.until_it_says("scheduler was killed (SIGKILL); started again in")
    launched.until_it_says('"phase": "generate"')
    launched.send(signal.SIGINT)
    assert launched.ended() == 130
    assert_nothing_is_left(launched)


def test_warnings_of_the_config_are_shown_at_the_start_and_logged(launch: Launch) -> None:
    launched = launch(algorithm=SHORT | {"top_p": 0.9})
    launched.until_it_says("algorithm.top_p=0.9: ")
    launched.send(signal.SIGINT)
    assert launched.ended() == 130
    assert "the update is biased" in (launched.job_folder().attempt().logs / "launcher.jsonl").read_text()


@pytest.mark.long
def test_a_run_that_fills_its_stream_of_events_stops_and_goes_on_once_the_stream_is_larger(
    launch: Launch, tmp_path: Path
) -> None:
    runtime = {"host_memory_root": str(tmp_path / "memory")}
    launched = launch(runtime=runtime | {"events_max_bytes": 2**20})
    launched.until_it_says('"phase": "starting"')
    asyncio.run(fill_events(launched.config()))
    assert launched.ended() == 1
    assert "bytes left of 1048576, too few to go on: raise runtime.events_max_bytes" in launched.said
    assert "go on with it: tidegate run" in launched.said
    assert_nothing_is_left(launched)
    again = launch("--resume", runtime=runtime | {"events_max_bytes": 2**22})
    again.until_it_says('"phase": "generate"')
    again.send(signal.SIGINT)
    assert again.ended() == 130


async def fill_events(config: JobConfig) -> None:
    """Fills the stream with events that change nothing in the job."""
    bus = await connect_bus(config, name="test", opens_after=0)
    source = EventSource("test", role=None, boot=1, now_ns=lambda: 1)
    failed = events_pb2.Failed(what=events_pb2.Failed.WHAT_SAMPLE, message="x" * 200_000)
    try:
        while await bus.events.free_bytes(JobId(config.job)) > 250_000:
            await bus.events.publish(source.event(failed, job=JobId(config.job), incarnation=1))
    finally:
        await bus.close()
