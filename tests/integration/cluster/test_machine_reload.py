"""The agent of another machine takes its program anew, and its processes live on for their stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from cli.command import execute
from services.node import machine
from services.node.job_memories import MARK, JobMemories
from services.scheduler.cluster.loop import LOST_AFTER_S
from tests.integration.cluster.machine_lab import ENDS_ON_TERM, WAITS, Lab, calls, programs_of
from tests.looking import until
from tests.ports import kept_port
from tests.stopping import stop
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster import keepers
from tidegate.machines import own_modules, release
from tidegate.runtime import handover
from tidegate.runtime.processes import Child, ServiceSpec, started
from tidegate.types import LOOPBACK, Role

AGENT = """
import argparse, json, os, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from services.node import machine
from tidegate.runtime.processes import Supervisor, started

folder, endpoint, code, kept_s = Path(sys.argv[1]), *sys.argv[2:]

def program(spec):
    return started(replace(spec, command=(sys.executable, "-c", code)))

machine.Supervisor = lambda _, **options: Supervisor(program, **options)
machine.KEPT_S, machine._TOLD_S = float(kept_s), 15.0

def take(_, state, **options):
    # This script starts again, and no command of tidegate. `meanwhile`: what ends before, by pid the signal.
    if (meanwhile := folder / "meanwhile").exists():
        for pid, number in json.loads(meanwhile.read_text()).items():
            os.kill(int(pid), number)
        meanwhile.unlink()
    machine.handover.take_program((sys.executable, *sys.orig_argv[1:]), state)

machine.NextProgram.take = take
sys.exit(machine.main(argparse.Namespace(
    listen=endpoint, credentials=folder / "node", host_memory_root=folder / "memory", log=folder / "helper.log",
    device="cpu", program=(sys.executable, "-m", "cli"), words=(),
)))
"""


@dataclass
class Agent:
    """A process of its own, whose processes run `code`."""

    lab: Lab
    code: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self, code: str, *, kept_s: int = 30) -> None:
        self.code = code
        words = [sys.executable, "-c", AGENT, str(self.lab.folder), self.lab.server.endpoint, code, str(kept_s)]
        self.run(words)

    def run(self, words: list[str]) -> int:
        """Once it listens, its pid."""
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.listens()
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def listens(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        assert "listens on" in self.process.stdout.readline()

    def reload(self, meanwhile: Mapping[int, int] | None = None) -> None:
        """`meanwhile`: a signal for each of these processes, after the callers were told."""
        (self.lab.folder / "meanwhile").write_text(json.dumps(dict(meanwhile or {})))
        self.send(handover.SIGNAL)
        self.listens()

    def programs(self) -> list[psutil.Process]:
        assert self.process is not None
        return programs_of(psutil.Process(self.process.pid), self.code)


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "b"), tmp_path / "node")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    (tmp_path / "memory").mkdir()
    lab = Lab(tmp_path)
    with kept_port() as port:
        lab.server = await lab.serve(f"{LOOPBACK}:{port}")
        await lab.server.stop(grace_s=0)
        found = Agent(lab)
        yield found
        for stand_in in lab.stand_ins:
            with suppress(ProcessLookupError):
                stand_in.kill()
            await stand_in.communicate()
        if found.process is not None:
            found.process.kill()
            found.process.communicate()


async def test_a_stand_in_goes_on_with_its_process(agent: Agent) -> None:
    agent.start(ENDS_ON_TERM)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: "ready" in agent.lab.printed(config))
    before = agent.programs()
    for number in (1, 2):
        await asyncio.to_thread(agent.reload)
        assert agent.process is not None
        assert handover.number_of(agent.process.pid) == number
    assert agent.process is not None
    stand_in.terminate()
    assert await stand_in.wait() == 7
    assert len(before) == 1
    assert not before[0].is_running()
    await until(lambda: not Path(config.runtime.host_memory_root).exists())


async def test_a_process_that_ends_meanwhile_is_told(agent: Agent) -> None:
    agent.start(ENDS_ON_TERM)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: "ready" in agent.lab.printed(config))
    (program,) = agent.programs()
    await asyncio.to_thread(agent.reload, {program.pid: signal.SIGTERM})
    assert await stand_in.wait() == 7


async def test_a_process_that_nobody_asks_for_ends(agent: Agent) -> None:
    agent.start(WAITS, kept_s=2)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: len(agent.programs()) == 1)
    (program,) = agent.programs()
    await asyncio.to_thread(agent.reload, {stand_in.pid: signal.SIGKILL})
    await until(lambda: not program.is_running())
    await until(lambda: not Path(config.runtime.host_memory_root).exists())


async def test_a_process_dies_with_an_agent_that_has_another_program(agent: Agent) -> None:
    agent.start(WAITS, kept_s=20)
    stand_in = await agent.lab.stand_in(agent.lab.config())
    await until(lambda: len(agent.programs()) == 1)
    (program,) = agent.programs()
    await asyncio.to_thread(agent.reload)
    assert program.is_running()
    agent.send(signal.SIGKILL)
    assert await stand_in.wait() == 1
    await until(lambda: not program.is_running())


async def test_a_process_is_of_the_release_of_its_job(tmp_path: Path, agent: Agent) -> None:
    lab = agent.lab
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    seen: list[ServiceSpec] = []

    def program(spec: ServiceSpec) -> Child:
        seen.append(spec)
        return started(spec)

    lab.program = program  # type: ignore[method-assign]  # it looks only
    config = lab.config()
    start = lab.hosted(config, Role.ROLLOUT).start(Path(config.runtime.host_memory_root))
    assert (start.release, start.python, start.modules) == (release(), sys.executable, own_modules())
    lab.server = await lab.serve()
    for other in ({}, {"release": "0.0+other", "python": str(python), "modules": "/of/then"}):
        for name, value in other.items():
            setattr(start, name, value)
        async with aclosing(calls(lab, start)) as call:
            while (await anext(call)).WhichOneof("body") != "started":
                pass  # the one before is still ending
    assert [(spec.command[0], spec.env["PYTHONPATH"].split(os.pathsep)[0]) for spec in seen] == [
        (sys.executable, own_modules()),
        (str(python), "/of/then"),
    ]
    for path in (str(tmp_path / "none"), sys.executable):
        start.python = path
        with pytest.raises(grpc.aio.AioRpcError, match=rf"of release 0.0\+other in {path}, and this machine has"):
            [_ async for _ in calls(lab, start)]
    await lab.server.stop(grace_s=0)


def test_what_a_killed_agent_had_not_removed_yet_goes(tmp_path: Path) -> None:
    left, other = tmp_path / f".tidegate-{os.getuid()}-0a1b-77", tmp_path / ".tidegate-999999-0a1b-77"
    for folder in (left, other):
        (folder / "snapshots").mkdir(parents=True)
    JobMemories(tmp_path).finish()
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


async def test_what_a_killed_agent_left_goes_with_the_start_of_the_next_one(agent: Agent) -> None:
    agent.start(WAITS)
    config = agent.lab.config()
    await agent.lab.stand_in(config)
    await until(lambda: len(agent.programs()) == 1)
    memory = Path(config.runtime.host_memory_root)
    await until(lambda: (memory / MARK).is_file())
    (memory / "version").write_bytes(b"weights")
    assert agent.process is not None
    # It would remove the folder in order once its callers are gone.
    stop(agent.process.pid)
    for stand_in in agent.lab.stand_ins:
        stand_in.kill()
    agent.process.kill()
    agent.process.communicate()
    assert await asyncio.to_thread((memory / "version").exists)
    agent.start(WAITS)
    assert not await asyncio.to_thread(memory.exists)


HAS_A_CHILD = """
import ctypes, os, signal, time
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    print("ready", flush=True)
while True: time.sleep(60)
"""


async def test_a_process_that_was_killed_leaves_no_zombies(agent: Agent) -> None:
    agent.start(HAS_A_CHILD)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: "ready" in agent.lab.printed(config))
    (program,) = agent.programs()
    (child,) = program.children()
    program.kill()
    await stand_in.wait()
    await until(lambda: not child.is_running())


def test_a_kept_process_is_gone_before_its_job_goes_on_elsewhere() -> None:
    """Where its agent took another program just before the machine, or the one that keeps the cluster, was lost."""
    gone_s = machine.KEPT_S + machine._STOP_S
    assert gone_s < LOST_AFTER_S
    assert keepers.LOST_S + gone_s <= keepers.SILENT_S


async def test_a_stop_while_it_tells_its_callers_ends_them_in_order(agent: Agent) -> None:
    agent.start(ENDS_ON_TERM)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: "ready" in agent.lab.printed(config))
    (program,) = agent.programs()
    stop(stand_in.pid)  # so that it takes a while
    agent.send(handover.SIGNAL)
    start = agent.lab.hosted(config).start(Path(config.runtime.host_memory_root))
    start.kept_pid = 1
    told = ""
    while "takes its program anew" not in told:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [_ async for _ in calls(agent.lab, start)]
        told = str(refused.value.details())
    agent.send(signal.SIGTERM)
    stand_in.send_signal(signal.SIGCONT)
    assert agent.process is not None
    assert await asyncio.to_thread(agent.process.wait, 60) == 0
    assert not program.is_running()
    await until(lambda: not Path(config.runtime.host_memory_root).exists())


async def test_another_process_in_its_place_waits_for_no_caller(agent: Agent) -> None:
    agent.start(WAITS, kept_s=1000)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: len(agent.programs()) == 1)
    (program,) = agent.programs()
    await asyncio.to_thread(agent.reload, {stand_in.pid: signal.SIGKILL})
    await agent.lab.started(agent.lab.hosted(config))
    await until(lambda: not program.is_running() and len(agent.programs()) == 1)


def test_what_is_no_agent_is_not_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it has a handler for the signal."""
    handles = f"import signal, time; signal.signal({int(handover.SIGNAL)}, print)"
    code = f"{handles}; print('ready', flush=True); time.sleep(1000)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert execute(["reload", "--agent", str(other.pid)]) == 1
        assert f"process {other.pid} is no agent" in capsys.readouterr().err
        assert not handover.takes_programs(other.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()
    assert execute(["reload", "--agent", str(other.pid)]) == 1
    assert f"there is no process {other.pid}" in capsys.readouterr().err
    assert execute(["reload", "--agent", "0"]) == 1


async def test_an_agent_is_reloaded_by_its_pid_and_not_where_its_program_is_broken(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = agent.lab
    program = lab.folder / "tidegate"
    shutil.copy(Path(sys.executable).with_name("tidegate"), program)
    places = ("--credentials", str(lab.folder / "node"), "--host-memory-root", str(lab.folder / "memory"))
    pid = agent.run([str(program), "agent", "--listen", lab.server.endpoint, *places])
    own = ["reload", "--agent", str(pid)]
    assert await asyncio.to_thread(execute, own) == 0
    assert f"the agent {pid} goes on with what {program} is now" in capsys.readouterr().out
    agent.listens()
    program.write_text("#!/bin/sh\necho boom >&2; exit 1\n")
    assert await asyncio.to_thread(execute, own) == 1
    assert "is of an earlier release: boom. Nothing has changed, and jobs run on" in capsys.readouterr().err
    assert handover.number_of(pid) == 1
    assert handover.takes_programs(pid)


async def test_a_process_that_was_not_kept_is_refused(agent: Agent) -> None:
    lab = agent.lab
    config = lab.config()
    start = lab.hosted(config).start(Path(config.runtime.host_memory_root))
    start.kept_pid = 7
    lab.server = await lab.serve()
    with pytest.raises(grpc.aio.AioRpcError, match="no process 7 of actor@n0 was kept"):
        [_ async for _ in calls(lab, start)]
    await lab.server.stop(grace_s=0)
