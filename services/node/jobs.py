"""The jobs that the agent starts: one launcher for each, a child of the agent that dies with it.

Invariants:
- A start of a job happens once, however often it is asked for. [test_node_jobs: a_start_happens_once]
- A job has one launcher at a time. [test_node_jobs: while_an_earlier_one_lives]
- A launcher that tells no end was killed, and its job can go on. [test_node_jobs: that_was_killed_leaves_a_job]
- A submission takes a job's folder once. Its later starts go on with it, whoever asks for them.
  [test_node_jobs: removes_an_earlier_run_once] [test_node_jobs: nobody_remembers]
- What a killed launcher leaves in host memory goes at once. [test_node_jobs: that_was_killed_leaves_no_host_memory]
- A submission that has ended is not started again, where its end did not reach the queue.
  [test_node_jobs: whose_end_nobody_recorded]
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.submissions import Treatment
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.job import JobFolder
from tidegate.json_text import parse_json, typed
from tidegate.launcher.checkpoint import furthest_iteration
from tidegate.launcher.claim import host_memory_folder, write_private
from tidegate.launcher.control import NotRunning, control_of
from tidegate.launcher.left_memory import Removals, is_left_by_launcher
from tidegate.launcher.outcome import End, Outcome
from tidegate.launcher.services import service_env
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.processes import ServiceEnd, ServiceSpec, Supervisor
from tidegate.types import JobId
from tidegate.v1 import control_pb2

KEPT = 256
"""The ended starts that are told. The scheduler, who asks each second, has recorded earlier ones long ago."""
STOP_TIMEOUT_S = 60.0
"""The time for a launcher's orderly end. Its own children have 10 s each."""
LAUNCHER = "services.node.launch"
_JOB = "job-"


class StillRuns(RuntimeError):
    """An earlier start of the job has a living process."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a job. `end` is None while its launcher lives. `has_begun`: it may have changed the job's folder.
    `iteration`: where its checkpoints let it go on."""

    number: int
    folder: JobFolder
    end: End | None = None
    message: str = ""
    has_begun: bool = True
    iteration: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder.root)}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Start:
        """Reads what `to_json` made."""
        end = None if fields["end"] is None else End(fields["end"])
        return cls(**{**fields, "folder": JobFolder(Path(fields["folder"])), "end": end})


def _recorded(folder: JobFolder) -> Outcome | None:
    """The end for good that a run has recorded. None: it can go on, or its record is damaged."""
    with suppress(FileNotFoundError, ValueError):
        outcome = Outcome.read(folder.result)
        return None if outcome.end is End.INTERRUPTED else outcome
    return None


class NodeJobs:
    """`prepare` gives a job what it needs on this machine, and returns the config of its launcher. `leave` takes it
    back."""

    def __init__(
        self,
        folder: ClusterFolder,
        supervisor: Supervisor,
        *,
        prepare: Callable[[JobConfig], Awaitable[JobConfig]],
        leave: Callable[[JobId], Awaitable[None]],
        changed: Callable[[], None],
        starts: Mapping[JobId, Start] | None = None,
    ) -> None:
        """`starts`: those of an agent whose place this one takes. Its launchers are the supervisor's."""
        self._folder = folder
        self._supervisor = supervisor
        self._prepare = prepare
        self._leave = leave
        self._changed = changed
        self._starts: dict[JobId, Start] = dict(starts or {})
        self._stops: dict[tuple[JobId, bool], asyncio.Task[None]] = {}
        """By job, and whether it is for good: an orderly end may hang where a machine of the job is away."""
        self._one_at_a_time = asyncio.Lock()
        self._removals = Removals()
        self._log = structlog.get_logger("agent")

    @property
    def starts(self) -> dict[JobId, Start]:
        """The last start of each job since this agent began."""
        return dict(self._starts)

    def unchanging(self) -> AbstractAsyncContextManager[None]:
        """Within it no start is under way."""
        return self._one_at_a_time

    async def start(
        self,
        job: JobId,
        number: int,
        config: JobConfig,
        treatment: Treatment,
        command: str,
        *,
        submitted_unix_ms: int = 0,
    ) -> None:
        """`submitted_unix_ms` names the submission. StillRuns. OSError."""
        async with self._one_at_a_time:
            if (known := self._starts.get(job)) is not None:
                if known.number == number:
                    return
                if known.end is None:
                    raise StillRuns(f"start {known.number} of job {job} still has a process: stop it before {number}")
            folder = JobFolder.of(config)
            begun, submission = self._folder.job_begun(job), str(submitted_unix_ms)
            has_begun = begun.is_file() and begun.read_text() == submission
            if has_begun:
                treatment = Treatment.RESUME  # what is there is of an earlier start
                if (outcome := _recorded(folder)) is not None:
                    self._starts[job] = Start(number, folder, outcome.end, outcome.reason)
                    self._log.info("job had ended", job=job, start=number, end=outcome.end, message=outcome.reason)
                    self._changed()
                    return
            else:
                begun.unlink(missing_ok=True)  # of another submission
            if treatment is Treatment.RESUME and (number > 1 or has_begun) and not folder.config.exists():
                treatment = Treatment.FRESH  # an earlier start ended before it had made the folder
            path = self._folder.job_config(job)
            try:
                prepared = await self._prepare(config)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_private(path, prepared.to_json())
                self._folder.job_end(job).unlink(missing_ok=True)
                pid = self._supervisor.start(self._launcher_of(job, config, treatment, submission, command))
            except BaseException:  # a call that is cancelled leaves no rights either
                await self._leave(job)
                raise
            self._starts[job] = Start(number, folder)
            self._log.info("job started", job=job, start=number, treatment=treatment, pid=pid)
            self._changed()

    def _launcher_of(
        self, job: JobId, config: JobConfig, treatment: Treatment, submission: str, command: str
    ) -> ServiceSpec:
        words = ["--config", str(self._folder.job_config(job)), "--treatment", treatment]
        words += ["--end", str(self._folder.job_end(job))]
        words += ["--begun", str(self._folder.job_begun(job)), "--submission", submission]
        return ServiceSpec(
            name=f"{_JOB}{job}",
            command=(sys.executable, "-m", LAUNCHER, *words, "--command", command),
            log_path=self._folder.job_output(job),
            env=service_env(config.cluster.device),
            stop_timeout_s=STOP_TIMEOUT_S,
        )

    def stop(self, job: JobId, *, cancels: bool, reason: str = "") -> None:
        """Ends what runs of the job: for good and with a reason, or so that it can go on. Returns at once."""
        known = self._starts.get(job)
        if known is None or known.end is not None or (job, cancels) in self._stops:
            return
        task = asyncio.create_task(self._stopped(job, known, cancels=cancels, reason=reason), name=f"stop-{job}")
        self._stops[job, cancels] = task
        task.add_done_callback(lambda _: self._stops.pop((job, cancels), None))

    async def _stopped(self, job: JobId, start: Start, *, cancels: bool, reason: str) -> None:
        if cancels:
            with suppress(NotRunning, PeerUnavailable, PeerRefused):
                async with control_of(start.folder) as control:
                    await control.CancelJob(control_pb2.CancelJobRequest(job=job, reason=reason))
                return
        if self._supervisor.pid(f"{_JOB}{job}") is not None:
            await self._supervisor.stop(f"{_JOB}{job}")

    async def note_end(self, ended: ServiceEnd) -> None:
        """Notes the end of a launcher. Another service's is ignored."""
        if not ended.name.startswith(_JOB):
            return
        job = JobId(ended.name.removeprefix(_JOB))
        end, message, has_begun = self._end_of(job, ended)
        async with self._one_at_a_time:
            await self._leave(job)
            self._remove_left(job)
            checkpoints = self._starts[job].folder.checkpoints
            iteration = await asyncio.to_thread(furthest_iteration, checkpoints)
            # The newest at the end, so that the oldest are dropped.
            start = self._starts.pop(job)
            self._starts[job] = replace(start, end=end, message=message, has_begun=has_begun, iteration=iteration)
            over = [each for each, start in self._starts.items() if start.end is not None]
            for each in over[: max(0, len(over) - KEPT)]:
                del self._starts[each]
            self._supervisor.forget(ended.name)
            await asyncio.to_thread(self._folder.remove_forgotten, {*self._starts})
        self._log.info("job ended", job=job, end=end, message=message)
        self._changed()

    def _remove_left(self, job: JobId) -> None:
        """What the job's launcher left in host memory, where it was killed."""
        with suppress(ConfigError, OSError):  # its config is of another release, or gone
            memory = host_memory_folder(JobConfig.read(self._folder.job_config(job)))
            self._removals.go_on(memory.parent)
            if is_left_by_launcher(memory):
                self._removals.begin(memory)

    def _end_of(self, job: JobId, ended: ServiceEnd) -> tuple[End, str, bool]:
        try:
            fields = typed(dict, parse_json(self._folder.job_end(job).read_bytes()), "an end")
            message, has_begun = typed(str, fields["message"], "message"), typed(bool, fields["has_begun"], "has_begun")
            return End(fields["end"]), message, has_begun
        except FileNotFoundError:
            how = f"ended with status {ended.exit_status}"
            if ended.exit_status < 0:
                how = f"was killed ({signal.Signals(-ended.exit_status).name})"
            return (
                End.INTERRUPTED,
                f"its launcher {how}: see {self._folder.job_output(job)}",
                self._folder.job_begun(job).is_file(),
            )
        except (ValueError, KeyError) as error:
            has_begun = self._folder.job_begun(job).is_file()
            return End.INTERRUPTED, f"its launcher's end cannot be read ({error})", has_begun

    async def aclose(self) -> None:
        """Interrupts all jobs, and waits until they have ended."""
        alive = [job for job, start in self._starts.items() if start.end is None]
        await self._supervisor.stop(*(f"{_JOB}{job}" for job in alive))
        for job in alive:
            self._remove_left(job)
        for task in list(self._stops.values()):
            await asyncio.gather(task, return_exceptions=True)
