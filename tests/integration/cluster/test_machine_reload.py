"""The agent of another machine takes its program anew, and its processes live on for their stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from cli.command import execute
from services.node.job_memories import JobMemories, JobStart
from services.node.machine import Kept, MachineLeft
from tests.integration.cluster.machine_lab import ENDS_ON_TERM, WAITS, Lab, calls, until
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.runtime import handover
from tidegate.runtime.processes import Child, ServiceEnd, ServiceSpec, Watched, started
from tidegate.types import Role

AGENT = """
import argparse, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from services.node import machine
from tidegate.runtime.processes import Supervisor, started

folder, endpoint, code, kept_s = Path(sys.argv[1]), *sys.argv[2:]

def program(spec):
    return started(replace(spec, command=(sys.executable, "-c", code)))

machine.Supervisor = lambda _, **options: Supervisor(program, **options)
machine.KEPT_S = float(kept_s)
sys.exit(machine.main(argparse.Namespace(
    listen=endpoint, credentials=folder / "node", host_memory_root=folder / "memory", log=folder / "helper.log",
    device="cpu", again=[sys.executable, *sys.orig_argv[1:]],
)))
"""


@dataclass
class Agent:
    """A process of its own, whose processes run `code`."""

    lab: Lab
    process: subprocess.Popen[str] | None = None

    def start(self, code: str, *, kept_s: int = 30) -> None:
        words = [sys.executable, "-c", AGENT, str(self.lab.folder), self.lab.server.endpoint, code, str(kept_s)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.listens()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def listens(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        assert "listens on" in self.process.stdout.readline()

    def reload(self) -> None:
        self.send(handover.SIGNAL)
        self.listens()

    def programs(self) -> list[psutil.Process]:
        assert self.process is not None
        found = []
        for each in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it has just ended
                found += [each] if each.cmdline()[1:2] == ["-c"] else []
        return found


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "b"), tmp_path / "node")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    (tmp_path / "memory").mkdir()
    lab = Lab(tmp_path)
    lab.server = await lab.serve()
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
    assert await asyncio.to_thread(execute, ["reload", "--agent", str(agent.process.pid)]) == 0
    agent.listens()
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
    stand_in.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(agent.reload)
    program.terminate()
    await until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
    stand_in.send_signal(signal.SIGCONT)
    assert await stand_in.wait() == 7


async def test_a_process_that_nobody_asks_for_ends(agent: Agent) -> None:
    agent.start(WAITS, kept_s=1)
    config = agent.lab.config()
    stand_in = await agent.lab.stand_in(config)
    await until(lambda: len(agent.programs()) == 1)
    (program,) = agent.programs()
    stand_in.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(agent.reload)
    await until(lambda: not program.is_running())
    await until(lambda: not Path(config.runtime.host_memory_root).exists())
    stand_in.send_signal(signal.SIGCONT)
    assert await stand_in.wait() == 1
    assert stand_in.stderr is not None
    assert b"of actor@n0 was kept, or it was ended since" in await stand_in.stderr.read()


async def test_a_process_dies_with_an_agent_that_has_another_program(agent: Agent) -> None:
    agent.start(WAITS, kept_s=2)
    stand_in = await agent.lab.stand_in(agent.lab.config())
    await until(lambda: len(agent.programs()) == 1)
    (program,) = agent.programs()
    await asyncio.to_thread(agent.reload)
    assert program.is_running()
    agent.send(signal.SIGKILL)
    assert await stand_in.wait() == 1
    await until(lambda: not program.is_running())


async def test_a_process_is_of_the_release_of_its_job(tmp_path: Path, agent: Agent) -> None:
    """Also one that starts under the next program, until the job starts anew."""
    lab = agent.lab
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    seen: list[ServiceSpec] = []

    def program(spec: ServiceSpec) -> Child:
        seen.append(spec)
        return started(spec)

    lab.program = program  # type: ignore[method-assign]  # it looks only
    config = lab.config()
    memory = Path(config.runtime.host_memory_root)
    start = lab.hosted(config, Role.ROLLOUT).start(memory)
    earlier = JobStart(JobStart.of_now(dict(start.files)).digest, str(python), "/of/then")
    lab.server = await lab.serve(left=MachineLeft((), {memory: earlier}))
    for _ in range(2):
        async with aclosing(calls(lab, start)) as call:
            assert (await anext(call)).WhichOneof("body") == "started"
    assert [(spec.command[0], spec.env["PYTHONPATH"].split(os.pathsep)[0]) for spec in seen] == [
        (str(python), "/of/then")
    ] * 2
    start.files["credentials/job/store.password"] = b"of another start"
    async with aclosing(calls(lab, start)) as call:
        assert (await anext(call)).WhichOneof("body") == "started"
    assert seen[-1].command[0] == sys.executable
    await lab.server.stop(grace_s=0)


def test_the_release_of_a_job_is_forgotten_where_it_is_the_agents(tmp_path: Path) -> None:
    now = JobStart.of_now({"a": b"1"})
    assert JobMemories(tmp_path, {tmp_path: now}).start_of(tmp_path, {"a": b"2"}) != now
    assert JobMemories(tmp_path, {tmp_path: now}).start_of(tmp_path, {"a": b"1"}) == now


def test_what_takes_no_other_program_is_not_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    sleeps = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        assert execute(["reload", "--agent", str(sleeps.pid)]) == 1
        assert f"process {sleeps.pid} takes no other program: it is no agent" in capsys.readouterr().err
        assert sleeps.poll() is None
    finally:
        sleeps.kill()
        sleeps.wait()
    assert execute(["reload", "--agent", str(sleeps.pid)]) == 1
    assert f"the agent {sleeps.pid} has ended" in capsys.readouterr().err


async def test_a_process_that_was_not_kept_is_refused(agent: Agent) -> None:
    lab = agent.lab
    config = lab.config()
    start = lab.hosted(config).start(Path(config.runtime.host_memory_root))
    start.kept_pid = 7
    lab.server = await lab.serve()
    with pytest.raises(grpc.aio.AioRpcError, match="no process 7 of actor@n0 was kept"):
        [_ async for _ in calls(lab, start)]
    await lab.server.stop(grace_s=0)


def test_what_an_agent_leaves_is_what_was_left(tmp_path: Path) -> None:
    spec = ServiceSpec("actor@n0", ("/bin/true", "-m"), tmp_path / "log", env={"A": "1"})
    end = ServiceEnd("actor@n0", 7, -9, was_asked=True, restarts_in_s=None)
    processes = (
        Kept(tmp_path, Watched(spec, 7), (), "actor@n0", 7),
        Kept(tmp_path, None, (end,), "actor@n0", 8),
    )
    left = MachineLeft(processes, {tmp_path: JobStart("d", "/python", "/modules")})
    assert MachineLeft.of(json.loads(json.dumps(left.to_json()))) == left
