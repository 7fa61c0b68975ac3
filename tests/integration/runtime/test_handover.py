"""A process takes a new program: its services live on, and it watches them as before."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidegate.runtime import handover
from tidegate.runtime.next_program import NextProgram
from tidegate.runtime.processes import ServiceSpec, Watched

WAIT_S = 30
PROGRAM = """
import asyncio, json, os, signal, sys
from dataclasses import asdict
from pathlib import Path
from tidegate.runtime import handover
from tidegate.runtime.embedded import EmbeddedServers, RunningServers
from tidegate.runtime.processes import ServiceSpec, Supervisor, Watched

folder, script, *meanwhile = Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]

async def main():
    left = handover.handed_over(lambda fields: fields)
    supervisor = Supervisor()
    running = left and RunningServers(**left["servers"])
    async with EmbeddedServers(folder, running=running) as servers:
        if left is None:
            pid = supervisor.start(ServiceSpec("s", ("/bin/sh", "-c", script), folder / "s.log"))
            tell(pid, servers)
            sys.stdin.readline()
            state = {"services": [each.to_json() for each in supervisor.watched()], "servers": asdict(servers.running)}
            try:
                handover.take_program([sys.executable + "-which-is-not-there"], state)
            except FileNotFoundError:
                print("no program", flush=True)
            handover.take_program([sys.executable, *sys.orig_argv[1:]], state, keeps=[servers.running.lock_fd])
        if "holds" in meanwhile:
            print("holds", flush=True)
            sys.stdin.readline()
        got = asyncio.Queue()
        for number in (signal.SIGTERM, handover.SIGNAL):
            asyncio.get_running_loop().add_signal_handler(number, got.put_nowait, number)
        handover.ready()
        for each in left["services"]:
            supervisor.watch(Watched.of(each))
        tell(supervisor.pid("s"), servers)
        if "holds" in meanwhile:
            print({await got.get(), await got.get()} == {signal.SIGTERM, handover.SIGNAL}, flush=True)
        else:
            print((await supervisor.next_end()).exit_status, flush=True)
        await supervisor.aclose()

def tell(pid, servers):
    print(json.dumps([os.getpid(), pid, servers.nats.pid, servers.store.pid, servers.nats.port]), flush=True)

asyncio.run(main())
"""


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.popen = process

    def said(self) -> Any:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def numbers(self) -> list[int]:
        """The pids of the process, its service, NATS, Redis, and NATS's port."""
        found: list[int] = json.loads(self.said())
        return found

    def go_on(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()


@contextmanager
def started(tmp_path: Path, script: str, *meanwhile: str) -> Iterator[Process]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "servers"), script, *meanwhile]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


def test_the_services_live_on_and_the_servers_live_on_with_them(tmp_path: Path) -> None:
    with started(tmp_path, "exec sleep 1000") as process:
        before = process.numbers()
        process.go_on()
        assert process.said() == "no program"
        assert process.numbers() == before
        psutil.Process(before[1]).kill()
        assert process.said() == "-9"
        assert process.popen.wait(WAIT_S) == 0
        assert not any(psutil.pid_exists(pid) for pid in before[1:4])


def test_an_end_while_nobody_watched_is_told(tmp_path: Path) -> None:
    with started(tmp_path, "sleep 0.1; exit 3") as process:
        process.numbers()
        process.go_on()
        assert process.said() == "no program"
        process.numbers()
        assert process.said() == "3"


def test_services_die_with_it_as_before(tmp_path: Path) -> None:
    with started(tmp_path, "exec sleep 1000") as process:
        process.numbers()
        process.go_on()
        assert process.said() == "no program"
        family = [psutil.Process(pid) for pid in process.numbers()[1:4]]
        process.popen.kill()
        gone, _ = psutil.wait_procs(family, timeout=WAIT_S)
        assert len(gone) == 3


def test_a_stop_meanwhile_is_carried_out_afterwards(tmp_path: Path) -> None:
    with started(tmp_path, "exec sleep 1000", "holds") as process:
        process.numbers()
        process.go_on()
        assert process.said() == "no program"
        assert process.said() == "holds"
        process.popen.send_signal(signal.SIGTERM)
        process.popen.send_signal(handover.SIGNAL)
        process.go_on()
        process.numbers()
        assert process.said() == "True"


@pytest.mark.parametrize(
    ("text", "told"),
    [('{"form": 99}', "of form 99, and this one knows 1"), ("{}", "cannot be read: KeyError"), ("[", "cannot be read")],
)
def test_what_was_left_of_another_form_is_refused(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    monkeypatch.setenv(handover.VARIABLE, f"{fd}:1")
    assert handover.is_handed_over()
    with pytest.raises(handover.NoHandover, match=told):
        handover.handed_over(dict)
    assert not handover.is_handed_over()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(fd)


def test_a_service_that_waits_for_its_restart_is_started() -> None:
    spec = ServiceSpec("s", ("/bin/true",), Path("/dev/null"), env={"A": "b"}, max_restarts=3, stays=True)
    for watched in (Watched(spec, None), Watched(replace(spec, env={}), 7)):
        assert Watched.of(json.loads(json.dumps(watched.to_json()))) == watched


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (("/none/tidegate",), "the program /none/tidegate cannot be started: No such file or directory"),
        (("/bin/sh", "-c", "echo no >&2; exit 1"), "does not start, or is of an earlier release: no"),
        (("/bin/sh", "-c", "exit 1"), "does not start, or is of an earlier release: no message"),
        (("/bin/sh", "-c", "echo 99"), f"reads states of form '99', and this one leaves {handover.FORM}"),
    ],
)
async def test_a_program_that_does_not_start_or_is_of_another_form_is_told(program: tuple[str, ...], told: str) -> None:
    assert re.search(told, await handover.program_fault(program))


@pytest.mark.parametrize("script", ["exec sleep 1000", "sleep 1000; true"])
async def test_a_program_that_hangs_is_told(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another program that it waits for has its output."""
    monkeypatch.setattr(handover, "_ANSWER_S", 0.5)
    assert "has not begun within 0.5 s" in await handover.program_fault(("/bin/sh", "-c", script))


async def test_this_program_can_take_the_place_of_itself() -> None:
    assert await handover.program_fault((sys.executable, "-m", "cli")) == ""


def test_the_environment_is_as_before_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "1")
    monkeypatch.setenv("B", "2")
    found = handover.changed_environment({"A": None, "B": "3"})
    assert ("A" in found, found["B"]) == (False, "3")
    program = NextProgram(("/bin/tidegate",), ("up", "n0=8"), {"A": None, "B": "3"})
    assert NextProgram.of(program.to_json()) == program
