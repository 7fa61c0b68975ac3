"""The processes of a job as their launcher holds them: started, watched, started again, ended to the last one.

Each service is the leader of a session of its own, so that the terminal's Ctrl-C reaches the launcher alone and all
that a service forked can be found. When a service ends, what is left of its session is killed before the service is
reaped: until then its number cannot name another session. Invariants:
- the kernel kills a service when the launcher dies, however that happens (`tied`);
- once a service's end is told, nothing of its session lives;
- a service that fails is started again at most `max_restarts` times in `restart_window_s`, later each time; one that
  leaves with status 0, or was told to stop, is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.runtime import tied
from tidegate.runtime.launch import until_readable

_BACKOFF_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """`command[0]` is an absolute path; `env` is added to the launcher's environment."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    restart_window_s: float = 60.0
    first_backoff_s: float = 0.25
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """A service ended. `restarts_in_s` is None when it stays away; `was_asked` when it had been told to stop."""

    name: str
    pid: int
    exit_status: int
    was_asked: bool
    restarts_in_s: float | None


class Supervisor:
    """See the module. Use it on the thread that lives as long as the launcher: the main one."""

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}
        self._ends: asyncio.Queue[ServiceEnd] = asyncio.Queue()

    def start(self, spec: ServiceSpec) -> int:
        """Its process id. ValueError when a service of that name runs, or its program is not there."""
        if spec.name in self._services and not self._services[spec.name].is_over:
            raise ValueError(f"service {spec.name} runs already as pid {self._services[spec.name].pid}; stop it first")
        if not os.access(spec.command[0], os.X_OK) or not os.path.isabs(spec.command[0]):
            raise ValueError(f"service {spec.name}: {spec.command[0]!r} is not the absolute path of a program")
        # A service started again goes to the end of the order.
        self._services.pop(spec.name, None)
        self._services[spec.name] = _Service(spec, self._ends)
        return self._services[spec.name].pid

    def pid(self, name: str) -> int | None:
        """None while it is not running."""
        service = self._services.get(name)
        return service.running_pid if service is not None else None

    async def next_end(self) -> ServiceEnd:
        """Ends of services, asked for or not, in order."""
        return await self._ends.get()

    async def stop(self, *names: str) -> list[ServiceEnd]:
        """SIGTERM, then SIGKILL to what is left after its time; returns how each ended, with its session gone."""
        return await asyncio.gather(*(self._services[name].stop() for name in names))

    async def aclose(self) -> None:
        """Stops what still runs, one by one, the last started first: nobody loses what he was started on."""
        for service in reversed(list(self._services.values())):
            await service.stop()


class _Service:
    """One service over its restarts."""

    def __init__(self, spec: ServiceSpec, ends: asyncio.Queue[ServiceEnd]) -> None:
        self._spec = spec
        self._ends = ends
        self._stopping = asyncio.Event()
        self._restarts: deque[float] = deque()
        self._process = _spawn(spec)
        self._is_up = True
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
        """The last of its ends."""
        while True:
            exit_status = await self._until_ended()
            self._is_up = False
            delay_s = self._restart_delay(exit_status)
            end = ServiceEnd(self._spec.name, self._process.pid, exit_status, self._stopping.is_set(), delay_s)
            self._ends.put_nowait(end)
            if delay_s is None:
                return end
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
                return end
            self._process = _spawn(self._spec)
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
            # When the launcher's loop ends in the middle too: nothing remains. A dead, unreaped process takes a signal.
            ended.cancel()
            stopping.cancel()
            # Before the descriptor's number can name another process to the loop.
            await asyncio.gather(ended, stopping, return_exceptions=True)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 # killed: milliseconds
            os.close(pidfd)
            await _end_session(self._process.pid)
            exit_status = self._process.wait()
        return exit_status

    def _restart_delay(self, exit_status: int) -> float | None:
        """None: it stays away."""
        now = asyncio.get_running_loop().time()
        while self._restarts and self._restarts[0] < now - self._spec.restart_window_s:
            self._restarts.popleft()
        num_restarts = len(self._restarts)
        if self._stopping.is_set() or exit_status == 0 or num_restarts >= self._spec.max_restarts:
            return None
        self._restarts.append(now)
        return self._spec.first_backoff_s * _BACKOFF_GROWTH**num_restarts


def session_members(session: int) -> list[int]:
    """The living processes of a session but its leader."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == session:
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(entry.path, "stat").read_text()
            # The name in parentheses may hold anything; state, parent, group, session follow the last one.
            state, _parent, _group, in_session = stat.rpartition(")")[2].split()[:4]
            if int(in_session) == session and state not in "ZX":
                members.append(int(entry.name))
    return members


async def _end_session(session: int) -> None:
    """Kills what is left, children that were forked meanwhile included. The leader must be unreaped."""
    while members := session_members(session):
        for pid in members:
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    # Still of this session, so that the number names who was meant.
                    if os.getsid(pid) == session:
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        await until_readable(pidfd)
                finally:
                    os.close(pidfd)


def _spawn(spec: ServiceSpec) -> subprocess.Popen[bytes]:
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    # For this user only: unlike a log line, what a process prints was looked through by nobody.
    with open(spec.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), *spec.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.env},
            start_new_session=True,
        )
