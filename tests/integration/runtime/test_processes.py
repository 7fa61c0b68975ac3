"""A launcher's services: watched, restarted within their budget, and ended to the last process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate.runtime.processes import ENDS_AGAIN, Child, ServiceSpec, Supervisor, session_members, started

SHELL = "/bin/sh"
WAIT_S = 10
LAUNCHER = """
import asyncio, sys
from pathlib import Path
from tidegate.runtime.processes import ENDS_AGAIN, ServiceSpec, Supervisor

async def main():
    supervisor = Supervisor()
    supervisor.start(ServiceSpec("s", ("/bin/sh", "-c", "sleep 1000"), Path(sys.argv[1])))
    print(supervisor.pid("s"), flush=True)
    await supervisor.next_end()

asyncio.run(main())
"""


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    await supervisor.aclose()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A fifo that services write to when they are up."""
    path = tmp_path / "up"
    os.mkfifo(path)
    return path


def shell(tmp_path: Path, script: str, name: str = "service", **options: Any) -> ServiceSpec:
    return replace(ServiceSpec(name, (SHELL, "-c", script), tmp_path / f"{name}.log"), **options)


async def line_of(pipe: Path) -> str:
    return await asyncio.to_thread(lambda: pipe.read_text().strip())


async def test_a_service_gets_its_environment_and_writes_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    pid = supervisor.start(shell(tmp_path, "echo $COLOUR; exit 3", env={"COLOUR": "blue"}))
    end = await supervisor.next_end()
    assert (end.pid, end.exit_status, end.was_asked, end.restarts_in_s) == (pid, 3, False, None)
    assert (tmp_path / "service.log").read_text() == "blue\n"
    assert supervisor.pid("service") is None


async def test_a_failing_service_is_started_again_later_each_time_until_its_budget_is_spent(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(shell(tmp_path, "echo run; exit 1", max_restarts=2, first_backoff_s=0.01))
    ends = [await supervisor.next_end() for _ in range(3)]
    assert [end.restarts_in_s for end in ends] == [0.01, 0.02, None]
    assert len({end.pid for end in ends}) == 3
    assert (tmp_path / "service.log").read_text() == "run\n" * 3


async def test_a_service_that_fails_slowly_is_given_up_too(supervisor: Supervisor, tmp_path: Path) -> None:
    """Each start takes so long that few fall into one window, as with a server that does not answer."""
    budget: dict[str, Any] = {"max_restarts": 2, "first_backoff_s": 0.01, "restart_window_s": 6.0}
    supervisor.start(shell(tmp_path, "sleep 3.5; exit 1", **budget))
    assert [(await supervisor.next_end()).restarts_in_s for _ in range(3)] == [0.01, 0.02, None]


@pytest.mark.parametrize("status", [0, ENDS_AGAIN])
async def test_a_service_that_leaves_by_itself_is_not_restarted(
    supervisor: Supervisor, tmp_path: Path, status: int
) -> None:
    supervisor.start(shell(tmp_path, f"exit {status}", max_restarts=5))
    assert (await supervisor.next_end()).restarts_in_s is None


async def test_a_service_that_has_to_stay_is_restarted_after_any_end(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(shell(tmp_path, "exit 0", max_restarts=2, stays=True, first_backoff_s=0.01))
    assert [(await supervisor.next_end()).restarts_in_s is None for _ in range(3)] == [False, False, True]


async def test_a_killed_service_is_seen_and_nothing_of_its_session_is_left(
    supervisor: Supervisor, tmp_path: Path, pipe: Path
) -> None:
    pid = supervisor.start(shell(tmp_path, f"sleep 1000 & (sleep 1000 & echo up > {pipe}; wait) & wait"))
    assert await line_of(pipe) == "up"
    assert len(session_members(pid)) >= 2
    os.kill(pid, signal.SIGKILL)
    assert (await supervisor.next_end()).exit_status == -signal.SIGKILL
    assert session_members(pid) == []


async def test_a_stop_lets_a_service_finish(supervisor: Supervisor, tmp_path: Path, pipe: Path) -> None:
    script = f"trap 'echo bye; exit 0' TERM; echo up > {pipe}; while :; do sleep 0.01; done"
    supervisor.start(shell(tmp_path, script, max_restarts=3))
    assert await line_of(pipe) == "up"
    await supervisor.stop("service")
    end = await supervisor.next_end()
    assert (end.exit_status, end.was_asked, end.restarts_in_s) == (0, True, None)
    assert (tmp_path / "service.log").read_text() == "bye\n"


async def test_a_service_that_ignores_the_stop_is_killed(supervisor: Supervisor, tmp_path: Path, pipe: Path) -> None:
    script = f"trap '' TERM; echo up > {pipe}; while :; do sleep 0.01; done"
    pid = supervisor.start(shell(tmp_path, script, stop_timeout_s=0.1))
    assert await line_of(pipe) == "up"
    await supervisor.stop("service")
    assert (await supervisor.next_end()).exit_status == -signal.SIGKILL
    assert session_members(pid) == []


async def test_a_service_that_cannot_be_started_again_has_failed_once_more(tmp_path: Path) -> None:
    starts = list[int]()

    def start(spec: ServiceSpec) -> Child:
        starts.append(len(starts))
        if starts[-1] in (1, 2):
            raise OSError("no number for a process")
        return started(spec)

    supervisor = Supervisor(start)
    supervisor.start(shell(tmp_path, "sleep 1000", stays=True, max_restarts=4, first_backoff_s=0.01))
    pid = supervisor.pid("service")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        ends = [await supervisor.next_end() for _ in range(3)]
        while supervisor.pid("service") in (None, pid):  # noqa: ASYNC110 # a start is no event
            await asyncio.sleep(0.01)
    assert [(end.exit_status, end.restarts_in_s is None) for end in ends] == [(-9, False), (1, False), (1, False)]
    await supervisor.aclose()


async def test_a_stop_ends_the_wait_for_a_restart(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(shell(tmp_path, "exit 1", max_restarts=1, first_backoff_s=1000))
    assert (await supervisor.next_end()).restarts_in_s == 1000
    async with asyncio.timeout(WAIT_S):
        await supervisor.stop("service")


async def test_closing_ends_the_last_started_first(supervisor: Supervisor, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        supervisor.start(shell(tmp_path, "sleep 1000", name))
    await supervisor.aclose()
    assert [(await supervisor.next_end()).name for _ in range(3)] == ["third", "second", "first"]


async def test_a_name_runs_once_and_a_program_must_be_there(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(shell(tmp_path, "sleep 1000"))
    with pytest.raises(ValueError, match="already runs as pid"):
        supervisor.start(shell(tmp_path, "sleep 1000"))
    with pytest.raises(ValueError, match="not the absolute path"):
        supervisor.start(ServiceSpec("other", ("no-such-program",), tmp_path / "log"))


def test_a_loop_that_ends_without_a_stop_leaves_nothing(tmp_path: Path, pipe: Path) -> None:
    async def start_and_leave() -> int:
        supervisor = Supervisor()
        pid = supervisor.start(shell(tmp_path, f"trap '' TERM; sleep 1000 & echo up > {pipe}; wait"))
        assert await line_of(pipe) == "up"
        return pid

    pid = asyncio.run(start_and_leave())
    assert session_members(pid) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_services_die_with_their_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pidfd = os.pidfd_open(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate()
    assert select.select([pidfd], [], [], WAIT_S)[0]
    os.close(pidfd)


def test_a_subreaper_keeps_no_dead_orphan() -> None:
    program = """
import os, subprocess, sys, time
from tidegate.runtime.processes import reap_orphans
from tidegate.runtime.spawner import _become_subreaper

_become_subreaper()
own = subprocess.Popen(["/bin/true"])
# The orphan ends where its input does: a shell that still lived might reap it.
shell = "exec 3<&0; /bin/cat <&3 & echo $!; kill -9 $$"
parent = subprocess.Popen(["/bin/sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
orphan = int(parent.stdout.readline())
parent.wait()
parent.stdin.close()
while any(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z" for pid in (orphan, own.pid)):
    time.sleep(0.01)
reap_orphans({own.pid})
print(os.path.exists(f"/proc/{orphan}"), own.wait())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout == "False 0\n"
