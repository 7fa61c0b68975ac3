"""The agent starts a job's launcher once for each start, and tells how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.node.jobs import NodeJobs, StillRuns
from tests.unit.cluster_jobs import of_size
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.machines import Machines, far_machine
from tidegate.cluster.submissions import Treatment
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.launcher.claim import host_memory_folder
from tidegate.launcher.lock import LOCK, held, held_by
from tidegate.launcher.outcome import End, Outcome
from tidegate.runtime.processes import Supervisor
from tidegate.types import JobId, NodeId
from tidegate.v1 import control_pb2

JOB = JobId("one")
COMMAND = "tidegate submit one.yaml"


class Node:
    """Jobs that need nothing of their machine, and what was told of them."""

    def __init__(self, folder: Path) -> None:
        self.left: list[JobId] = []
        self.supervisor = Supervisor()
        self.num_changes = 0
        self.jobs = NodeJobs(
            ClusterFolder.of(folder), self.supervisor, prepare=self._prepared, leave=self._leave, changed=self._changed
        )
        config = of_size(JOB, 3)
        self.config = config.model_copy(update={"output_dir": str(folder)})

    async def start(self, number: int, treatment: Treatment = Treatment.FRESH, *, submission: int = 0) -> int:
        await self.jobs.start(JOB, number, self.config, treatment, COMMAND, submitted_unix_ms=submission)
        pid = self.supervisor.pid(f"job-{JOB}")
        assert pid is not None
        return pid

    async def ended(self) -> tuple[End | None, str]:
        await self.jobs.note_end(await self.supervisor.next_end())
        found = self.jobs.starts[JOB]
        return found.end, found.message

    async def _prepared(self, config: JobConfig) -> JobConfig:
        return config

    async def _leave(self, job: JobId) -> None:
        self.left.append(job)

    def _changed(self) -> None:
        self.num_changes += 1


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    found = Node(tmp_path)
    (tmp_path / ".cluster").mkdir()
    yield found
    await found.supervisor.aclose()


async def test_a_start_happens_once_and_none_while_an_earlier_one_lives(node: Node) -> None:
    pid = await node.start(1)
    assert await node.start(1) == pid
    with pytest.raises(StillRuns, match="start 1 of job one still has a process"):
        await node.start(2)
    assert node.num_changes == 1


async def test_a_launcher_that_was_killed_leaves_a_job_that_can_go_on(node: Node) -> None:
    pid = await node.start(1)
    for name in ("inc001-it000004", "inc002-it000003"):
        checkpoint = JobFolder.of(node.config).checkpoints / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    os.kill(pid, signal.SIGKILL)
    end, message = await node.ended()
    assert end is End.INTERRUPTED
    assert message.startswith("its launcher was killed (SIGKILL): see ")
    assert node.jobs.starts[JOB].iteration == 4
    assert node.left == [JOB]
    await node.jobs.start(JOB, 1, node.config, Treatment.FRESH, COMMAND)
    assert node.supervisor.pid(f"job-{JOB}") is None, "the same start is not made again"


async def test_a_launcher_that_was_killed_leaves_no_host_memory(node: Node) -> None:
    memory = host_memory_folder(node.config)
    for number, stays in ((1, True), (2, False)):
        pid = await node.start(number)
        await asyncio.to_thread(until_held, memory / LOCK)
        (memory / "version").write_bytes(b"weights")
        os.kill(pid, signal.SIGKILL)
        ended = await node.supervisor.next_end()
        if stays:  # another launcher has it already
            with held(memory / LOCK, ValueError):
                await node.jobs.note_end(ended)
        else:
            await node.jobs.note_end(ended)
        assert memory.exists() is stays


async def test_a_launcher_that_was_killed_at_the_agents_end_leaves_no_host_memory(node: Node) -> None:
    memory = host_memory_folder(node.config)
    pid = await node.start(1)
    await asyncio.to_thread(until_held, memory / LOCK)
    os.kill(pid, signal.SIGKILL)
    await node.jobs.aclose()
    assert not memory.exists()


def treatment_of(pid: int) -> str:
    """What a launcher was told, once it is one: before, it is this process."""
    deadline_s = time.monotonic() + 60
    while "--treatment" not in (words := psutil.Process(pid).cmdline()):
        assert time.monotonic() < deadline_s, words
        time.sleep(0.01)
    return words[words.index("--treatment") + 1]


def until_there(path: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} is not there"
        time.sleep(0.05)


def until_held(lock: Path) -> None:
    deadline_s = time.monotonic() + 60
    while held_by(lock) is None:
        assert time.monotonic() < deadline_s, f"{lock} is not held"
        time.sleep(0.05)


async def test_a_submission_with_force_removes_an_earlier_run_once(node: Node, tmp_path: Path) -> None:
    """However often its agent dies: before the launcher has begun, and after."""

    async def started(number: int, *, submission: int) -> list[str]:
        pid = await node.start(number, Treatment.FORCE, submission=submission)
        return [treatment_of(pid), str(pid)]

    (tmp_path / JOB).mkdir()
    how, pid = await started(1, submission=5)
    os.kill(int(pid), signal.SIGKILL)
    await node.ended()
    assert not node.jobs.starts[JOB].has_begun, "it has removed nothing"
    again, pid = await started(2, submission=5)
    assert (how, again) == ("force", "force")
    await asyncio.to_thread(until_there, JobFolder.of(node.config).config)
    os.kill(int(pid), signal.SIGKILL)
    await node.ended()
    assert node.jobs.starts[JOB].has_begun
    assert (await started(3, submission=5))[0] == "resume"
    node.jobs.stop(JOB, cancels=False)
    await node.ended()
    assert (await started(4, submission=6))[0] == "force"


async def test_a_start_that_nobody_remembers_is_gone_on_with(node: Node, tmp_path: Path) -> None:
    """The machine that kept the cluster was lost before it had told of the start."""
    pid = await node.start(1, submission=5)
    await asyncio.to_thread(until_there, JobFolder.of(node.config).config)
    os.kill(pid, signal.SIGKILL)
    await node.ended()
    await node.supervisor.aclose()
    other = Node(tmp_path)
    pid = await other.start(1, submission=5)
    assert treatment_of(pid) == "resume"
    await other.supervisor.aclose()


async def test_a_start_that_ended_before_it_had_made_the_folder_makes_it(node: Node, tmp_path: Path) -> None:
    """It had said that the folder is this submission's, and its agent ended too."""
    begun = ClusterFolder.of(tmp_path).job_begun(JOB)
    begun.parent.mkdir()
    begun.write_text("5")
    assert treatment_of(await node.start(1, submission=5)) == "fresh"


async def test_what_is_here_of_jobs_that_nobody_knows_goes(node: Node, tmp_path: Path) -> None:
    folder = ClusterFolder.of(tmp_path)
    for each in (folder.queue / "records", folder.root / "jobs", folder.logs):
        each.mkdir(parents=True)
    (folder.queue / "records" / "waits.json").touch()
    for job in map(JobId, ("waits", "forgotten", "forgotten-2")):
        for path in (folder.job_config(job), folder.job_end(job), folder.job_begun(job), folder.job_output(job)):
            path.touch()
            os.utime(path, (0, 0))
    (folder.logs / "agent.jsonl").touch()
    os.utime(folder.logs / "agent.jsonl", (0, 0))
    folder.job_config(JobId("young")).touch()
    os.kill(await node.start(1), signal.SIGKILL)
    await node.ended()
    there = {*(folder.root / "jobs").iterdir(), *folder.logs.iterdir()}
    assert {path.name.partition(".")[0] for path in there} == {"waits", "one", "young", "job-waits", "job-one", "agent"}
    assert len(there) == 8
    assert not node.supervisor._services, "the launcher is forgotten too"


async def test_a_job_whose_start_fails_has_no_rights(node: Node, tmp_path: Path) -> None:
    ClusterFolder.of(tmp_path).job_config(JOB).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        await node.start(1)
    assert node.left == [JOB]
    assert not node.jobs.starts


@pytest.mark.parametrize("end", [End.FINISHED, End.FAILED, End.CANCELLED])
async def test_a_submission_whose_end_nobody_recorded_is_not_started_again(
    node: Node, tmp_path: Path, end: End
) -> None:
    """The machine that kept the cluster ended just then. Another submission starts anew."""
    begun, folder = ClusterFolder.of(tmp_path).job_begun(JOB), JobFolder.of(node.config)
    begun.parent.mkdir()
    begun.write_text("5")
    folder.root.mkdir()
    job = control_pb2.GetJobResponse(job=JOB)
    Outcome(end=end, message="that is why", seed=0, wall_s=1.0, job=job).write(folder.result)
    await node.jobs.start(JOB, 2, node.config, Treatment.FRESH, COMMAND, submitted_unix_ms=5)
    found = node.jobs.starts[JOB]
    assert (found.number, found.end, found.message) == (2, end, "that is why")
    assert node.supervisor.pid(f"job-{JOB}") is None
    assert node.num_changes == 1
    pid = await node.start(3, Treatment.FORCE, submission=6)
    assert treatment_of(pid) == "force"


async def test_a_launcher_waits_for_the_lock_of_a_machine_that_is_lost(node: Node, tmp_path: Path) -> None:
    (tmp_path / JOB).mkdir()
    begun = ClusterFolder.of(tmp_path).job_begun(JOB)
    with held(tmp_path / JOB / LOCK, ValueError) as fd:
        os.pwrite(fd, json.dumps({"pid": 1, "machine": 1}).encode(), 0)
        await node.start(1)
        ended = asyncio.create_task(node.ended())
        done, _ = await asyncio.wait({ended}, timeout=5)
        assert not done
        assert not begun.exists()
    await asyncio.to_thread(until_there, begun)
    node.jobs.stop(JOB, cancels=False)
    assert (await ended)[0] is End.INTERRUPTED


async def test_a_job_that_cannot_start_tells_why(node: Node) -> None:
    await node.start(1, Treatment.RESUME)
    end, message = await node.ended()
    assert end is End.FAILED
    assert "there is nothing to resume" in message


async def test_a_stop_interrupts_a_launcher_in_order(node: Node) -> None:
    await node.start(1)
    node.jobs.stop(JOB, cancels=False)
    node.jobs.stop(JOB, cancels=False)
    end, message = await asyncio.wait_for(node.ended(), 60)
    assert end is End.INTERRUPTED
    assert "SIGTERM" in message


async def test_a_launcher_whose_other_machine_is_away_says_that_it_has_not_begun(
    node: Node, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    far = far_machine("b", "127.0.0.1:1", [NodeId("a")])
    machines = Machines("127.0.0.1", str(tmp_path / "operator"), "", (far,))
    node.config = node.config.model_copy(
        update={
            "cluster": machines.section_of(node.config.cluster),
            "runtime": node.config.runtime.model_copy(update={"gate_root": str(tmp_path_factory.mktemp("gates"))}),
        }
    )
    await node.start(1, Treatment.FORCE)
    end, message = await node.ended()
    assert end is End.INTERRUPTED
    assert "cluster.machines: b: " in message
    assert not node.jobs.starts[JOB].has_begun


async def test_a_stop_ends_a_launcher_whose_orderly_end_hangs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where a machine of a cancelled job is away."""
    asked = asyncio.Event()

    @asynccontextmanager
    async def silent(folder: JobFolder) -> AsyncIterator[None]:
        asked.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr("services.node.jobs.control_of", silent)
    await node.start(1)
    node.jobs.stop(JOB, cancels=True)
    await asked.wait()
    node.jobs.stop(JOB, cancels=False)
    end, message = await asyncio.wait_for(node.ended(), 60)
    assert (end, "SIGTERM" in message) == (End.INTERRUPTED, True)
