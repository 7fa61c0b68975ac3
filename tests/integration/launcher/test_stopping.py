"""However and whenever a run is stopped, nothing of it remains, and it says how to go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.launcher.launched import Launched, assert_nothing_is_left, processes_of, wait_until_gone
from tidegate.launcher.outcome import End, Outcome

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launches in the test's folder; what a failing test leaves is killed, launcher first."""
    yield lambda *arguments: Launched(tmp_path, *arguments)
    left = processes_of(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


MOMENTS = {
    "Ctrl-C while the servers start": ("NATS and Redis", signal.SIGINT, 130),
    "SIGTERM while the services start": ("fork servers and services", signal.SIGTERM, 143),
    "a closed terminal in mid-job": ('"phase": "generate"', signal.SIGHUP, 129),
}


@pytest.mark.parametrize("moment", MOMENTS)
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
    assert launched.job_folder().trace.exists()


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
