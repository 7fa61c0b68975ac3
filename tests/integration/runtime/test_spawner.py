"""Services that are forks of a process that has imported them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidegate.json_text import parse_json

REPOSITORY = Path(__file__).resolve().parents[3]
SERVICE = "tests.integration.runtime.spawned"
LAUNCHER = """
import asyncio, json, os, sys
from pathlib import Path
from tidegate.runtime.processes import ServiceSpec, Supervisor
from tidegate.runtime.spawner import Spawner

what, folder, module, loses_it, forks = sys.argv[1:6]
modules = ["tests.integration.runtime.spawned"]
if forks == "True":
    import tests.integration.runtime.spawned.__main__
    spawner = Spawner.forked(modules)
    assert spawner is not None
else:
    assert Spawner.forked(modules) is None, "a fork would have to import them"
    spawner = Spawner.begin(modules, env={}, log_path=Path(folder, "spawner.log"))

async def main():
    await spawner.ready()
    supervisor = Supervisor(spawner.start)
    if loses_it == "True":
        os.kill(spawner._process.pid, 9)
        os.waitid(os.P_PID, spawner._process.pid, os.WEXITED | os.WNOWAIT)
    command = (sys.executable, "-m", module, what, folder + "/told")
    supervisor.start(ServiceSpec("s", command, Path(folder, "log"), env={"WORD": "given"}))
    print(supervisor.pid("s"), flush=True)
    if what == "stay" and sys.stdin.read() == "":
        ended = (await supervisor.stop("s"))[0]
    else:
        ended = await supervisor.next_end()
    print(json.dumps([ended.pid, ended.exit_status]), flush=True)

asyncio.run(main())
"""


ORPHANS = """
import json, os, select, signal, socket, sys
from tidegate.runtime import spawner

gone = os.fork()
if gone == 0:
    os._exit(0)
os.waitpid(gone, 0)
own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
spawner._become_subreaper()
if os.fork() == 0:
    own.close()
    spawner._serve(other, gone)
    os._exit(0)
own.recv(64)
own.send(json.dumps({"words": ["python", "-m", "none"], "log": sys.argv[1], "env": {}}).encode())
service = os.pidfd_open(int(own.recv(64)))
is_gone = bool(select.select([service], [], [], 30)[0])
signal.pidfd_send_signal(service, signal.SIGKILL)
sys.exit(not is_gone)
"""


UNTOLD = """
import json, os, signal, socket, sys
from tidegate.runtime import spawner

own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
spawner._become_subreaper()
pid = os.fork()
if pid == 0:
    own.close()
    spawner._serve(other, os.getppid())
    os._exit(0)
other.close()
own.recv(64)
words = ["python", "-m", "tests.integration.runtime.spawned", "stay", sys.argv[2]]
own.send(json.dumps({"words": words, "log": sys.argv[1], "env": {}}).encode())
own.close()  # so that it cannot tell
signal.alarm(30)  # the service would stay
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def launched(
    folder: Path, what: str, *, module: str = SERVICE, loses_it: bool = False, forks: bool = False
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, what, str(folder), module, str(loses_it), str(forks)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def told(folder: Path) -> dict[str, Any]:
    return dict(parse_json((folder / "told").read_text()))


def test_a_service_whose_launcher_is_gone_ends(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS, str(tmp_path / "log")], cwd=REPOSITORY, check=False)
    assert done.returncode == 0


def test_a_service_that_nobody_was_told_of_ends_before_it_begins(tmp_path: Path) -> None:
    words = [sys.executable, "-c", UNTOLD, str(tmp_path / "log"), str(tmp_path / "told")]
    done = subprocess.run(words, cwd=REPOSITORY, check=False, stderr=subprocess.DEVNULL)
    assert (done.returncode, [*tmp_path.iterdir()]) == (0, [])


@pytest.mark.parametrize(("what", "status"), [("raise", 1), ("leave", 74), ("return", 3), ("none", 0)])
def test_a_service_ends_with_its_own_status_and_prints_into_its_log(tmp_path: Path, what: str, status: int) -> None:
    out, _ = launched(tmp_path, what).communicate(timeout=60)
    pid, end = out.splitlines()
    assert parse_json(end) == [int(pid), status]
    log = (tmp_path / "log").read_text()
    assert log.startswith("printed\n")
    assert ("RuntimeError: as the test wants it" in log) is (what == "raise")


@pytest.mark.parametrize("forks", [False, True], ids=["of a spawner that imports", "of a fork of the launcher"])
def test_a_service_is_a_child_of_its_launcher_and_dies_with_it(tmp_path: Path, forks: bool) -> None:
    launcher = launched(tmp_path, "stay", forks=forks)
    assert launcher.stdout is not None
    service, log = psutil.Process(int(launcher.stdout.readline())), tmp_path / "log"
    while not (log.exists() and "printed" in log.read_text()):
        time.sleep(0.01)
    found = told(tmp_path)
    assert (found["pid"], found["parent"], found["session"]) == (service.pid, launcher.pid, service.pid)
    assert found["word"] == "given"
    assert found["fds"] == [0, 1, 2], "none of the spawner's, and not the one of the file that it writes"
    assert service.cmdline()[:4] == [sys.executable, "-m", SERVICE, "stay"]
    children = psutil.Process(launcher.pid).children()
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    _, alive = psutil.wait_procs([service, *children], timeout=10)
    assert not alive


def test_a_service_that_is_asked_to_stop_is_reaped_by_its_launcher(tmp_path: Path) -> None:
    launcher = launched(tmp_path, "stay")
    out, _ = launcher.communicate(timeout=60)
    pid, end = out.splitlines()
    assert parse_json(end) == [int(pid), -signal.SIGTERM]


@pytest.mark.parametrize("loses_it", [False, True])
def test_what_the_spawner_does_not_have_is_started_as_a_new_program(tmp_path: Path, loses_it: bool) -> None:
    module = SERVICE if loses_it else f"{SERVICE}.__main__"
    out, _ = launched(tmp_path, "return", module=module, loses_it=loses_it).communicate(timeout=60)
    *_, pid, end = out.splitlines()
    assert parse_json(end) == [int(pid), 3]
    assert told(tmp_path)["word"] == "given"


def test_a_spawner_that_cannot_import_leaves_all_to_new_programs(tmp_path: Path) -> None:
    script = LAUNCHER.replace('modules = ["tests', 'modules = ["no.such.module", "tests')
    launcher = subprocess.run(
        [sys.executable, "-c", script, "return", str(tmp_path), SERVICE, "False", "False"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "it ended while it imported" in launcher.stdout + launcher.stderr
    assert parse_json(launcher.stdout.splitlines()[-1])[1] == 3
    assert "No module named 'no'" in (tmp_path / "spawner.log").read_text()
