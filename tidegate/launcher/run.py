"""Runs one job on this machine, from its checked config to its end, and leaves nothing behind.

Order:
1. All checks, before anything starts: config, tokenizer, layouts, data, servers, folder.
2. The folder's lock, host memory, embedded servers, fork servers, services, and the job's submission.
3. The launcher only watches. The scheduler ends the job, unless a server dies, a process cannot be kept up or a signal
   comes.
4. The end runs backwards.

Invariants:
- However a run ends, no process, port, socket or host memory of it remains. [test_stopping: signal_leaves_nothing]
- A signal at any moment leads to the same orderly end. [test_stopping: signal_leaves_nothing]
- A run that ends with work left says how to go on. [test_stopping: says_how_to_go_on]
- A cluster's run waits for the lock of a machine that was lost. [test_node_jobs: a_machine_that_is_lost]
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tidegate.adapters.nats_bus import NatsBus
from tidegate.attempts import end_attempt
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder, credentials_folder
from tidegate.config.checks.pace import budget_fault
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.schedule import lr_summary
from tidegate.config.sections.record import tracking_faults
from tidegate.events import EventSource
from tidegate.job import Job, JobFolder, load_job
from tidegate.launcher.claim import (
    CannotStart,
    Claim,
    Start,
    claim_folder,
    host_memory_folder,
    refuse_claim,
    refuse_running,
    write_private,
)
from tidegate.launcher.clocks import noted_clocks
from tidegate.launcher.data_check import with_checked_data
from tidegate.launcher.event_file import EventFile, is_log_of, room_after
from tidegate.launcher.follow import JobFollower
from tidegate.launcher.history import History, read_history, with_history
from tidegate.launcher.host_memory import check_host_memory
from tidegate.launcher.lock import LOCK, lives_here, record_of_holder
from tidegate.launcher.outcome import End, Outcome, at_rest
from tidegate.launcher.preflight import (
    Away,
    check_addresses,
    check_engine,
    check_machines,
    check_servers,
    check_weights,
)
from tidegate.launcher.services import FORKED, TRACKER, JobServices, service_env
from tidegate.launcher.view import View
from tidegate.logs import configure_logging
from tidegate.pace.steps import PacedSteps, paced_steps
from tidegate.ports.bus import BusUnavailable, JobNotOpen, StreamFull
from tidegate.runtime.cancellation import raise_if_cancelled
from tidegate.runtime.cores import num_cores
from tidegate.runtime.cuda import cuda_fault
from tidegate.runtime.embedded import EmbeddedServers, FolderInUse, ServerFailed
from tidegate.runtime.processes import ServiceEnd
from tidegate.runtime.server_kinds import ServerGuard
from tidegate.runtime.service import connect_bus
from tidegate.runtime.spawner import Spawner
from tidegate.timeline import Window, read_spans, write_trace
from tidegate.types import job_id
from tidegate.v1 import control_pb2

SOURCE = "launcher"
SILENT_S = 60.0
"""So long a NATS that we started may give no answer. It answers within milliseconds, but it has hung for good after a
write to a full disk. One that is not ours may be away for longer."""
UNLOCKED_WITHIN_S = 300.0
"""NFS takes a client for gone after 90 s by default."""
_DIES_WITHIN_S = 20.0
"""A launcher that is killed while it writes to a slow disk lives until it has written."""
SERVERS_BACK_WITHIN_S = 60.0
"""A running job survives their absence for a minute too."""
_LOOK_AGAIN_S = 1.0
"""Neither the end of a lock nor the return of a server is an event here."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunBroken(RuntimeError):
    """The run cannot go on, but not by the scheduler's decision. The job can be resumed."""


class EarlierLauncher(RuntimeError):
    """An earlier launcher of the job, on another machine, has its lock still."""


class NotRecorded(RuntimeError):
    """The run has ended, and its result could not be written. A resume writes it."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to run. A person types `resume_command` to go on with the job, and `fresh_command` to start over."""

    config: JobConfig
    start: Start
    resume_command: str
    fresh_command: str
    notes: tuple[str, ...] = ()
    """Remarks on how the config was read. They are shown with the config's warnings."""
    is_of_cluster: bool = False
    """Whether a cluster starts it, and keeps its store."""
    is_submitted: bool = False
    """Whether it is put into the queue of a cluster, whose slots may be on other machines, and is not started now."""


async def check_job(request: RunRequest) -> Job:
    """All checks of a start, without any change. ConfigError, or the job with its data's checksums."""
    job = await _checked(request)
    refuse_claim(
        job.config,
        request.start,
        fresh_command=request.fresh_command,
        resume_command=request.resume_command,
    )
    return job


async def run_job(
    request: RunRequest, view: View, spawner: Spawner | None = None, *, claimed: Callable[[], None] = lambda: None
) -> Outcome:
    """The outcome of the run. `spawner`: of the services; None: the run makes one. `claimed`: as `claim_folder` has it.

    Raises ConfigError when the job cannot start as requested, with nothing changed, EarlierLauncher likewise, and
    NotRecorded.
    """
    start_ns = time.monotonic_ns()
    with _cancelled_by_signals() as signals:
        run: _Run | None = None
        try:
            if request.is_of_cluster:
                await _until_unlocked(JobFolder.of(request.config))
            job = await _checked(request)
            raise_if_cancelled()
            claiming = claim_folder(
                job,
                request.start,
                now_unix_s=time.time(),
                fresh_command=request.fresh_command,
                resume_command=request.resume_command,
                claimed=claimed,
            )
            with claiming as claim:
                configure_logging(SOURCE, path=claim.attempt.logs / f"{SOURCE}.jsonl")
                _report_config(request, view)
                run = _Run(claim, request, view, spawner, start_ns=start_ns)
                return await run.to_its_end(signals)
        except asyncio.CancelledError:
            if not signals:
                raise
            # The signal came before there was anything to record.
            stopped = f"stopped by {signals[0].name} before it began; start it again"
            return _nothing_done(request, stopped, start_ns=start_ns, stopped_by=signals[0])


async def _until_unlocked(folder: JobFolder) -> None:
    """A machine that lost its power holds its locks on shared storage until the storage takes it for gone."""
    begins_s = time.monotonic()
    while (holder := await asyncio.to_thread(record_of_holder, folder.root / LOCK)) is not None:
        waited_s = time.monotonic() - begins_s
        if lives_here(holder) and waited_s > _DIES_WITHIN_S:
            return  # and is told as a job that runs
        if waited_s > UNLOCKED_WITHIN_S:
            raise EarlierLauncher(
                f"a launcher on another machine has the lock of job {folder.root.name} since {UNLOCKED_WITHIN_S:g} s: "
                f"end it there, or end its lock on the storage of {folder.root}"
            )
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _checked(request: RunRequest) -> Job:
    if fault := budget_fault(request.config.cluster, num_cores=num_cores()):
        raise ConfigError(fault)
    if not request.is_submitted and (fault := cuda_fault(request.config.cluster)):
        raise CannotStart(fault)
    if not (request.config.runtime.adopts_store or request.is_of_cluster):
        raise CannotStart(
            "runtime.adopts_store=false: nobody would open the job's Redis; only the agent of a cluster sets it, so "
            "leave it out"
        )
    check_addresses(request.config.cluster)
    job = load_job(request.config)
    refuse_running(JobFolder.of(request.config))
    if faults := tracking_faults(request.config.tracking):
        raise ConfigError("\n".join(faults))
    await check_engine(job)
    await check_weights(job)
    if not (request.is_submitted or request.is_of_cluster):
        # A cluster counts what its jobs need. What others have free now would end a job that has room by that count.
        check_host_memory(job)
    job = await with_checked_data(job)
    await _checked_servers(request)
    await check_machines(job.config.cluster, job)
    return job


async def _checked_servers(request: RunRequest) -> None:
    """A cluster starts its own again when they die, as may be just now."""
    begins_s = time.monotonic()
    while True:
        try:
            return await check_servers(request.config, request.start)
        except Away:
            if not request.is_of_cluster or time.monotonic() - begins_s > SERVERS_BACK_WITHIN_S:
                raise
        await asyncio.sleep(_LOOK_AGAIN_S)


def place_of(config: JobConfig) -> str:
    """A line with the whole path of the job's folder."""
    return f"the folder of job {config.job} is {JobFolder.of(config).root}"


def _report_config(request: RunRequest, view: View) -> None:
    for plan in (place_of(request.config), lr_summary(request.config)):
        structlog.get_logger(SOURCE).info("config", message=plan)
        view.plan(plan)
    for warning in (*request.notes, *request.config.warnings()):
        structlog.get_logger(SOURCE).warning("config", message=warning)
        view.note(warning)


@contextmanager
def _cancelled_by_signals() -> Iterator[list[signal.Signals]]:
    """The first signal cancels the current task. Later ones only count: the end is under way and bounded."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    seen: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        seen.append(number)
        if len(seen) == 1:
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield seen
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _nothing_done(request: RunRequest, message: str, *, start_ns: int, stopped_by: signal.Signals) -> Outcome:
    return Outcome(
        end=End.INTERRUPTED,
        message=message,
        seed=request.config.seed,
        wall_s=(time.monotonic_ns() - start_ns) / 1e9,
        job=control_pb2.GetJobResponse(job=request.config.job),
        stopped_by=stopped_by,
        has_begun=False,
    )


class _Run:
    """One run in its claimed folder."""

    def __init__(
        self, claim: Claim, request: RunRequest, view: View, spawner: Spawner | None, *, start_ns: int
    ) -> None:
        self._claim = claim
        self._folder = claim.folder
        self._config = claim.config
        self._request = request
        self._view = view
        self._spawner = spawner
        self._start_ns = start_ns
        self._follower: JobFollower | None = None
        self._has_bus = True
        self._log = structlog.get_logger(SOURCE)

    async def to_its_end(self, signals: list[signal.Signals]) -> Outcome:
        end, message = End.INTERRUPTED, ""
        try:
            async with noted_clocks(self._config.cluster, self._claim.attempt.timeline):
                end = await self._with_spawner()
            message = self._status().message
            if end is End.FAILED:
                message = f"{message}{_mark_after(message)}{self._resumed}"
        except asyncio.CancelledError:
            if not signals:
                raise
            message = self._going_on(f"stopped by {signals[0].name}")
        except JobNotOpen as error:
            message = self._going_on(f"NATS has lost the job's streams, so everything was stopped ({error})")
        except (RunBroken, ServerFailed, FolderInUse, BusUnavailable, StreamFull) as error:
            message = self._going_on(str(error))
        except OSError as error:  # such as a full disk
            self._log.error("interrupted", exc_info=True)
            message = self._going_on(f"the launcher failed: {error}")
        self._log.info("over", end=end, message=message)
        try:
            return self._record_outcome(end, message, signals)
        except OSError as error:
            why = f"it ended {end}, but the result could not be written to {self._folder.root}: {error}"
            raise NotRecorded(f"job {self._config.job}: {why}; make room there; {self._resumed}") from error

    def _going_on(self, why: str) -> str:
        """After an interruption. What a cluster does then, its queue says."""
        return why if self._request.is_of_cluster else f"{why}{_mark_after(why)}{self._resumed}"

    @property
    def _resumed(self) -> str:
        return f"go on with it: {self._request.resume_command}"

    def _status(self) -> control_pb2.GetJobResponse:
        return self._follower.status if self._follower else control_pb2.GetJobResponse(job=self._config.job)

    def _record_outcome(self, end: End, message: str, signals: list[signal.Signals]) -> Outcome:
        end_ns = time.monotonic_ns()
        window = Window(self._start_ns, end_ns)
        attempt = self._claim.attempt
        gpus, start_unix_ns = self._config.cluster.gpus(), time.time_ns() - window.wall_ns
        try:
            write_trace(
                attempt.timeline,
                attempt.trace,
                gpus=gpus,
                window=window,
                start_unix_ns=start_unix_ns,
                far=self._config.cluster.far_nodes(),
            )
        except OSError as error:  # the result is worth more
            self._view.note(f"the timeline could not be written: {error}")
        wall_s = window.wall_ns / 1e9
        history = self._history()
        outcome = Outcome(
            end=end,
            message=message,
            seed=self._config.seed,
            wall_s=wall_s,
            job=with_history(at_rest(self._status()), history),
            timeline=str(attempt.trace),
            seconds=history.seconds,
            pace=_steps_of(attempt.timeline, wall_s=wall_s) if self._config.cluster.pace else None,
            stopped_by=signals[0] if end is End.INTERRUPTED and signals else None,
        )
        outcome.write(self._folder.result)
        record = {"end": end, "message": message, "wall_s": round(outcome.wall_s, 3)}
        end_attempt(attempt, record, now_unix_s=time.time())
        return outcome

    async def _with_spawner(self) -> End:
        """A new one imports the services' modules while the servers start."""
        if self._spawner is not None:
            return await self._with_servers(self._spawner)
        env, log = service_env(self._config.cluster.device), self._claim.attempt.logs / "spawner.out"
        with closing(Spawner.begin(FORKED, env=env, log_path=log)) as spawner:
            return await self._with_servers(spawner)

    async def _with_servers(self, spawner: Spawner) -> End:
        """Starts an embedded server for each empty URL."""
        urls = self._config.servers
        if urls.nats_url and urls.redis_url:
            return await self._with_services(spawner)
        self._view.step("NATS and Redis")
        memory = Path(self._config.runtime.host_memory_root)
        own, *users = (credential_folder(memory, party) for party in (Party.NODE, Party.SCHEDULER, Party.JOB))
        async with EmbeddedServers(self._folder.servers, guard=ServerGuard.of(own, *users)) as servers:
            raise_if_cancelled()
            job_credentials = str(credentials_folder(memory))
            found: dict[str, str] = {}
            if not urls.nats_url:
                found |= {"nats_url": servers.nats.url, "nats_credentials": job_credentials}
            if not urls.redis_url:
                found |= {"redis_url": servers.store.url, "redis_credentials": job_credentials}
            self._config = self._config.model_copy(update={"servers": urls.model_copy(update=found)})
            write_private(self._folder.config, self._config.to_json())
            return await _first_of(self._with_services(spawner), self._servers_died(servers))

    async def _servers_died(self, servers: EmbeddedServers) -> End:
        dead = await servers.first_exit()
        self._has_bus = self._has_bus and dead is not servers.nats
        raise RunBroken(
            f"the embedded {dead.name} died (see the end of {dead.log_path}), so everything was stopped; the data that "
            "it acknowledged is on disk"
        )

    async def _with_services(self, spawner: Spawner) -> End:
        room = room_after(self._folder.events, attempt=self._claim.attempt.number)
        async with AsyncExitStack() as stack:
            bus = await connect_bus(
                self._config,
                name=SOURCE,
                opens_after=room,
            )
            stack.push_async_callback(bus.close)
            if not await self._goes_on_from_the_file(bus):
                await bus.streams.begin_anew(job_id(self._config.job), after_sequence=room)
            gives_up_after_s = None if self._request.config.servers.nats_url else SILENT_S
            self._follower = JobFollower(bus, self._config, self._folder, self._view, gives_up_after_s=gives_up_after_s)
            stack.push_async_callback(self._keep_events, self._follower)
            services = JobServices(
                self._config,
                self._folder,
                sockets=host_memory_folder(self._request.config),
                boot=self._claim.boot,
                start_child=spawner.start,
            )
            stack.push_async_callback(services.stop)
            stack.push_async_callback(self._follower.look_once_more)
            raise_if_cancelled()
            source = EventSource(SOURCE, role=None, boot=self._claim.boot, now_ns=time.time_ns)
            is_resumed = self._request.start is Start.RESUME
            if (found := self._claim.checkpoint) is not None and found.passed_over:
                unread = f"cannot be read: {', '.join(found.passed_over)}"
                self._view.note(f"{unread}; goes on from checkpoint {found.name}, trains again what came after it")
            # Submit first: where the streams are lost, a join that is folded before it would supersede an iteration
            # that the checkpoint has.
            await self._follower.submit(source, resume=is_resumed, checkpoint=self._claim.checkpoint)
            raise_if_cancelled()
            self._view.step("fork servers and services")
            await spawner.ready()
            raise_if_cancelled()
            services.start()
            return await _first_of(
                self._follower.end(), self._services_failed(services), self._events_unusable(self._follower)
            )

    async def _goes_on_from_the_file(self, bus: NatsBus) -> bool:
        """Whether the stream of a job that is resumed has what its folder has."""
        kept = EventFile(self._folder.events).kept if self._request.start is Start.RESUME else None
        return kept is None or await is_log_of(kept, bus.events, job_id(self._config.job))

    async def _events_unusable(self, follower: JobFollower) -> End:
        raise RunBroken(await follower.until_unusable())

    async def _keep_events(self, follower: JobFollower) -> None:
        if not self._has_bus:
            return
        try:
            await follower.write_last_events()
        except (BusUnavailable, JobNotOpen) as error:  # a resumed run writes the events that the server still has
            self._log.warning("last events not written", error=str(error))

    def _history(self) -> History:
        try:
            return read_history(self._folder.events)
        except OSError as error:  # the scheduler's report has the newest iterations
            self._log.warning("history not read", error=str(error))
            return History()

    async def _services_failed(self, services: JobServices) -> End:
        while True:
            ended = await services.next_end()
            self._log.warning("process ended", name=ended.name, pid=ended.pid, status=ended.exit_status)
            if ended.name == TRACKER:
                log = services.log_of(ended.name)
                self._view.note(f"{ended.name} {_how(ended)}{_last_words(log)}: metrics are not tracked from here on")
                continue
            if ended.restarts_in_s is None:
                log = services.log_of(ended.name)
                raise RunBroken(
                    f"{ended.name} {_how(ended)}{_last_words(log)} and is not started again; see {log} and "
                    f"{self._folder.command('logs', ended.name)}"
                )
            said = _last_words(services.log_of(ended.name)) if ended.exit_status > 0 else ""
            self._view.note(f"{ended.name} {_how(ended)}{said}; started again in {ended.restarts_in_s:g} s")


def _mark_after(why: str) -> str:
    return "\n" if "\n" in why else "; "  # a traceback has lines of its own


def _steps_of(timeline: Path, *, wall_s: float) -> PacedSteps:
    works = (dict(span.work) for spans in read_spans(timeline).values() for span in spans)
    return paced_steps(works, wall_s=wall_s)


def _how(ended: ServiceEnd) -> str:
    if ended.exit_status < 0:
        return f"was killed ({signal.Signals(-ended.exit_status).name})"
    return f"ended with status {ended.exit_status}"


def _last_words(log: Path) -> str:
    """The last line that a process printed. In a traceback that is the exception."""
    with suppress(FileNotFoundError):
        lines = log.read_text(errors="replace").split("\n")
        return next((f" ({line})" for line in reversed(lines) if line.strip()), "")
    return ""


async def _first_of(*works: Coroutine[Any, Any, End]) -> End:
    """The first to end decides. The others are cancelled and awaited, so that they have cleaned up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(task for task in tasks if task in done).result()
