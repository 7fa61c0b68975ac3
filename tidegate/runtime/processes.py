"""The processes of a job in their launcher: it starts, watches and restarts them, and ends every one of them.

Each service leads its own session. So the terminal's Ctrl-C reaches only the launcher, and everything that a service
forked can be found. When a service ends, the rest of its session is killed before the service is reaped: until then
its number cannot name another session.

Invariants:
- The kernel kills a service when the launcher dies, however that happens (`dies_with_parent`).
  [test_processes: services_die_with_their_launcher]
- Once a service's end is reported, no process of its session lives.
  [test_processes: nothing_of_its_session_is_left]
- A service that ends is restarted at most `max_restarts` times in `restart_window_s`, later each time. One that fails
  by itself within that time of its start has failed in a row, however long each start took.
  [test_processes: later_each_time_until_its_budget] [test_processes: that_fails_slowly_is_given_up_too]
- A service that leaves with status 0 is not restarted, unless it has to stay (`stays`), nor one that says by
  `ENDS_AGAIN` that it would not help. [test_processes: a_service_that_leaves] [test_processes: that_has_to_stay]
- One that cannot be started again has failed once more. [test_processes: cannot_be_started_again]
- A service that was asked to stop is not restarted. [test_processes: stop_ends_the_wait_for_a_restart]
- A subreaper keeps no dead process of its dead children. [test_processes: keeps_no_dead_orphan]
- A launcher that takes a new program (`handover`) watches its services on, as if it had started them.
  [test_handover: the_services_live_on] [test_handover: while_nobody_watched]
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from tidegate.runtime import dies_with_parent
from tidegate.runtime.launch import until_readable

ENDS_AGAIN = os.EX_IOERR
"""The exit status of a service that would end in the same way if it were started again."""
_BACKOFF_GROWTH = 2.0
_MOST_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """`command[0]` is an absolute path. `env` is added to the launcher's environment. `stays`: it never leaves by
    itself, so that an end with status 0 is somebody's mistake."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    stays: bool = False
    restart_window_s: float = 60.0
    first_backoff_s: float = 0.25
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """The end of a service. `restarts_in_s` is None when it stays away. `was_asked`: something had asked it to stop."""

    name: str
    pid: int
    exit_status: int
    was_asked: bool
    restarts_in_s: float | None


class Child(Protocol):
    """A process that this one waits for."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        ...


class ChildByPid:
    """A child of this process that a fork of it has started, or this process itself under an earlier program."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def kill(self) -> None:
        """Does nothing where it is dead."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """As `wait`. None while it lives."""
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        """The exit status, negative for a signal. The child must be dead, or this waits for it."""
        status = self._waited(0)
        assert status is not None, "it was waited for"
        return status

    def _waited(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


@dataclass(frozen=True, slots=True)
class Watched:
    """A service that runs, or that is to be started again."""

    spec: ServiceSpec
    pid: int | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.spec), "log_path": str(self.spec.log_path), "pid": self.pid}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Watched:
        """Reads what `to_json` made, under this form of handovers."""
        told = dict(fields)
        pid, log, command = told.pop("pid"), Path(told.pop("log_path")), tuple(told.pop("command"))
        return cls(ServiceSpec(log_path=log, command=command, **told), pid)


StartChild = Callable[[ServiceSpec], Child]
"""Starts a service's process, as a child of this one that leads a session and dies with it."""


class Supervisor:
    """See the module head. Use it on the thread that lives as long as the launcher: the main one. Without `start_child`
    a service is a new program (`started`)."""

    def __init__(self, start_child: StartChild | None = None, *, untold: Iterable[ServiceEnd] = ()) -> None:
        """`untold`: ends that this process has not told under its earlier program."""
        self._start_child = start_child or started
        self._services: dict[str, _Service] = {}
        self._ends: asyncio.Queue[ServiceEnd] = asyncio.Queue()
        for end in untold:
            self._ends.put_nowait(end)

    def start(self, spec: ServiceSpec) -> int:
        """Returns the process id. ValueError when a service of that name runs, or its program does not exist."""
        if spec.name in self._services and not self._services[spec.name].is_over:
            raise ValueError(f"service {spec.name} already runs as pid {self._services[spec.name].pid}; stop it first")
        if not os.access(spec.command[0], os.X_OK) or not os.path.isabs(spec.command[0]):
            raise ValueError(f"service {spec.name}: {spec.command[0]!r} is not the absolute path of a program")
        # A restarted service goes to the end of the order.
        self._services.pop(spec.name, None)
        self._services[spec.name] = _Service(spec, self._ends, self._start_child)
        return self._services[spec.name].pid

    def watch(self, service: Watched) -> None:
        """A service of this process under its earlier program. One that was to be started again is started."""
        assert service.spec.name not in self._services, f"{service.spec.name} is watched already"
        child = None if service.pid is None else ChildByPid(service.pid)
        self._services[service.spec.name] = _Service(service.spec, self._ends, self._start_child, child)

    def watched(self) -> list[Watched]:
        """Those that run or are to be started again, in the order of their starts."""
        alive = [each for each in self._services.values() if not each.is_over]
        return [Watched(each.spec, each.running_pid) for each in alive]

    @property
    def pids(self) -> set[int]:
        """The processes that it waits for."""
        return {each.pid for each in self._services.values() if not each.is_over}

    def untold_ends(self) -> list[ServiceEnd]:
        """Those that nobody has asked for. They are told by this call, and not again."""
        return [self._ends.get_nowait() for _ in range(self._ends.qsize())]

    def pid(self, name: str) -> int | None:
        """None while the service does not run."""
        service = self._services.get(name)
        return service.running_pid if service is not None else None

    async def next_end(self) -> ServiceEnd:
        """The next end of a service, requested or not, in order."""
        return await self._ends.get()

    async def stop(self, *names: str) -> list[ServiceEnd]:
        """Sends SIGTERM, then SIGKILL after the service's time. Returns how each ended, with its session gone."""
        return await asyncio.gather(*(self._services[name].stop() for name in names))

    def forget(self, name: str) -> None:
        """A service that is over, so that it takes no memory any more."""
        if name in self._services and self._services[name].is_over:
            del self._services[name]

    async def aclose(self) -> None:
        """Stops the services that still run, the last started first, so that none loses a service that it needs."""
        for service in reversed(list(self._services.values())):
            await service.stop()


class _Service:
    """One service over its restarts."""

    def __init__(
        self, spec: ServiceSpec, ends: asyncio.Queue[ServiceEnd], start_child: StartChild, child: Child | None = None
    ) -> None:
        """`child`: its process that runs already."""
        self.spec = self._spec = spec
        self._start_child = start_child
        self._ends = ends
        self._stopping = asyncio.Event()
        self._restarts: deque[float] = deque()
        self._spawn(child)
        self._life = asyncio.create_task(self._live(), name=f"service-{spec.name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running_pid(self) -> int | None:
        return self._process.pid if self._is_up else None

    @property
    def is_over(self) -> bool:
        return self._life.done()

    async def stop(self) -> ServiceEnd:
        self._stopping.set()
        return await asyncio.shield(self._life)

    async def _live(self) -> ServiceEnd:
        """Returns the last of the service's ends."""
        exit_status = await self._until_ended()
        while True:
            self._is_up = False
            delay_s = self._restart_delay(exit_status)
            end = ServiceEnd(self._spec.name, self._process.pid, exit_status, self._stopping.is_set(), delay_s)
            self._ends.put_nowait(end)
            if delay_s is None:
                return end
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
                return end
            exit_status = await self._again()

    async def _again(self) -> int:
        """The exit status of its next process."""
        try:
            self._spawn()
        except OSError as error:  # no memory, no number for a process, no room for its log
            structlog.get_logger("processes").warning("not started again", service=self._spec.name, error=str(error))
            return 1
        return await self._until_ended()

    def _spawn(self, child: Child | None = None) -> None:
        self._started_s = asyncio.get_running_loop().time()
        self._process = child or self._start_child(self._spec)
        self._is_up = True

    async def _until_ended(self) -> int:
        pidfd = os.pidfd_open(self._process.pid)
        ended = asyncio.create_task(until_readable(pidfd))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                await asyncio.wait({ended}, timeout=self._spec.stop_timeout_s)
        finally:
            # Also when the launcher's loop ends in the middle: nothing remains. A dead, unreaped process takes signals.
            ended.cancel()
            stopping.cancel()
            # Wait, before the descriptor's number can name another process to the loop.
            await asyncio.gather(ended, stopping, return_exceptions=True)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 # killed: milliseconds
            os.close(pidfd)
            await _end_session(self._process.pid)
            exit_status = self._process.wait()
        return exit_status

    def _restart_delay(self, exit_status: int) -> float | None:
        """None: the service stays away."""
        now, window_s = asyncio.get_running_loop().time(), self._spec.restart_window_s
        has_failed_at_start = exit_status > 0 and now - self._started_s < window_s
        while self._restarts and self._restarts[0] < now - window_s and not has_failed_at_start:
            self._restarts.popleft()
        num_restarts = len(self._restarts)
        has_left = exit_status == ENDS_AGAIN or (exit_status == 0 and not self._spec.stays)
        if self._stopping.is_set() or has_left or num_restarts >= self._spec.max_restarts:
            return None
        self._restarts.append(now)
        first_s = self._spec.first_backoff_s
        return min(first_s * _BACKOFF_GROWTH ** min(num_restarts, 16), max(first_s, _MOST_BACKOFF_S))


def reap_orphans(known: Collection[int]) -> None:
    """Reaps the dead children of this thread that it has not started: those of its dead children come to a subreaper.
    `known`: the pids of those that it has started, and waits for itself."""
    for pid in map(int, Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()):
        with suppress(ChildProcessError, FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" and pid not in known:
                os.waitpid(pid, os.WNOHANG)


def session_members(session: int) -> list[int]:
    """The living processes of a session except its leader."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == session:
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(entry.path, "stat").read_text()
            # The name in parentheses may have any characters; state, parent, group, session follow the last one.
            state, _parent, _group, in_session = stat.rpartition(")")[2].split()[:4]
            if int(in_session) == session and state not in "ZX":
                members.append(int(entry.name))
    return members


async def _end_session(session: int) -> None:
    """Kills the rest of the session, including children forked meanwhile. The leader must be unreaped."""
    while members := session_members(session):
        for pid in members:
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    # Check that it is still of this session, so that the pid names the intended process.
                    if os.getsid(pid) == session:
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        await until_readable(pidfd)
                finally:
                    os.close(pidfd)
            # An orphan of a launcher that is a subreaper is its child.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 # it is dead


def started(spec: ServiceSpec) -> Child:
    """The process of a service, as a new program."""
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    # For this user only: a log line has its secrets removed, but the output of a process has not.
    with open(spec.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()), *spec.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.env},
            start_new_session=True,
        )
