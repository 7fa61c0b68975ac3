"""All workers of one service instance on its node: starts them through the gate, calls, watches and ends them.

Invariants:
- A worker has passed the gate with its grant. The GPU is held exactly as long as the worker lives or until it stands
  down. [test_instance_port: workers_start_through_the_gate]
- A standby, which has no token, holds no GPU. [test_instance_port: takes_a_gpu_and_gives_it_back]
- A GPU has one worker. A call reaches the worker of exactly its token. [test_instance_port: call_under_another_token]
- A stop reaches the worker of its token or of an earlier one, which a start that was given up may have left, and never
  that of a later owner. [test_instance_port: stop_ends_a_worker_of_an_earlier_token]
- No standby starts beside a worker that has the GPU. [test_instance_port: no_standby_starts_beside]
- To start a running worker or to stop an absent one changes nothing.
  [test_instance_port: repeated_start_and_a_repeated_stop]
- An unrequested death is reported to `on_death` once, after the worker's calls have failed.
  [test_instance_port: death_is_reported_once]
- A timeline that cannot be written ends no worker. [test_instance_port: timeline_that_cannot_be_written]
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from urllib.parse import quote

import structlog

from tidegate.codec import encode_token
from tidegate.gate import Gate, GateClosed
from tidegate.lines import append_lines
from tidegate.runtime.crew import WorkerGone
from tidegate.runtime.launch import WorkerFds, WorkerLauncher, WorkerSpec
from tidegate.runtime.local_worker import LocalWorker, hand_over
from tidegate.types import LOOPBACK, GpuId, Grant
from tidegate.v1 import workers_pb2 as wire

OnDeath = Callable[[Grant, int, str], Awaitable[None]]
"""(grant, exit status; negative: the signal, the error in its own words or nothing)."""


@dataclass(frozen=True, slots=True)
class WorkerHome:
    """What the workers of an instance run, where they write, and how long they may take.

    `timeline` is a file of JSON lines {"gpu", "state", "start_ns", "end_ns"}, with "work" where it is known, and
    {"gpu", "released_ns"} for a slot that was given back (`tidegate.timeline`).
    `works_for` is the job and the role, for people who list the processes.
    """

    entry: str
    log_dir: Path
    timeline: Path
    works_for: str
    address: str = LOOPBACK
    """Where the torch stores of the workers' worlds listen."""
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0


class _Outcome(Enum):
    """The outcome of a start."""

    RAN = auto()
    STARTED = auto()
    TOOK_GPU = auto()
    """A standby took the GPU."""


class LocalWorkers:
    """See the module head. One event loop uses it."""

    def __init__(self, home: WorkerHome, *, gate: Gate, launcher: WorkerLauncher, on_death: OnDeath) -> None:
        for folder in (home.log_dir, home.timeline.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._gate = gate
        self._launcher = launcher
        self._on_death = on_death
        self._workers: dict[GpuId, LocalWorker] = {}
        self._stores: dict[GpuId, tuple[str, int]] = {}
        self._locks: defaultdict[GpuId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._watches: set[asyncio.Task[None]] = set()
        self._reports_timeline_faults = True
        self._log = structlog.get_logger("workers")

    def running(self) -> tuple[Grant, ...]:
        """The grants of the living workers, in order of GPU."""
        return tuple(sorted(worker.grant for worker in self._workers.values() if worker.is_alive))

    async def start(self, grants: Sequence[Grant]) -> None:
        """Returns when all are ready for calls.

        StaleToken, GateClosed, LaunchRefused, LauncherGone, WorkerGone or TimeoutError: then each worker is as before,
        and also after a cancellation.
        """
        starts = [asyncio.ensure_future(self._start(grant)) for grant in grants]
        try:
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
        except asyncio.CancelledError:
            await self._undo(grants, await asyncio.gather(*starts, return_exceptions=True))
            raise
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self._undo(grants, outcomes)
            raise failures[0]

    async def _undo(self, grants: Sequence[Grant], outcomes: Sequence[_Outcome | BaseException]) -> None:
        for grant, outcome in zip(grants, outcomes, strict=True):
            if outcome is _Outcome.STARTED:
                await self.stop([grant])
            elif outcome is _Outcome.TOOK_GPU:
                await self.stand_down([grant])

    async def stand_down(self, grants: Sequence[Grant]) -> None:
        """The workers give their GPUs back and become standbys. Returns when the gates are free.

        WorkerGone, WorkerRefused, TimeoutError or GateClosed.
        """
        await asyncio.gather(*(self._stand_down(grant) for grant in grants))

    async def stop(self, grants: Sequence[Grant]) -> None:
        """Returns when no worker has these grants or earlier ones of their GPUs, and the GPUs are free.

        GateClosed when one is not.
        """
        await asyncio.gather(*(self._stop(grant) for grant in grants))

    async def call(
        self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float
    ) -> AsyncGenerator[wire.WorkerReply, None]:
        """Yields the replies as they come. WorkerRefused (nothing changed), WorkerGone or TimeoutError."""
        worker = self._worker(grant)
        addressed = wire.WorkerCall()
        addressed.CopyFrom(call)
        addressed.gpu = grant.gpu
        addressed.token.CopyFrom(encode_token(grant.token))
        async with aclosing(worker.call(addressed, timeout_s=timeout_s)) as replies:
            async for reply in replies:
                yield reply

    def store_address(self, grant: Grant) -> tuple[str, int]:
        """The address at which the worker's `store_listener` listens. WorkerGone without that worker."""
        self._worker(grant)
        return self._stores[grant.gpu]

    async def aclose(self) -> None:
        """Stops all workers."""
        await self.stop([worker.grant for worker in self._workers.values()])
        await asyncio.gather(*self._watches)

    def _worker(self, grant: Grant) -> LocalWorker:
        worker = self._workers.get(grant.gpu)
        if worker is None or not worker.is_alive:
            raise WorkerGone(f"no worker runs on {grant.gpu} (the call is under token {grant.token})")
        if worker.grant != grant:
            raise WorkerGone(
                f"the call for {grant.gpu} carries token {grant.token}, its worker runs under {worker.grant.token}: "
                "refused, ask the scheduler who owns it now"
            )
        return worker

    async def _start(self, grant: Grant) -> _Outcome:
        async with self._locks[grant.gpu]:
            running = self._workers.get(grant.gpu)
            if running is not None and running.is_alive and running.grant == grant:
                return _Outcome.RAN
            if running is not None and running.is_alive and running.grant.stands_by:
                await running.take_gpu(self._gate.acquire(grant))
                return _Outcome.TOOK_GPU
            if running is not None and running.is_alive and grant.stands_by:
                raise GateClosed(
                    f"{grant.gpu} has a worker under {running.grant.token}, which hangs or still ends: nothing stands "
                    "by beside it; stop it first"
                )
            worker = await self._launch(grant)
            try:
                await worker.until_ready(timeout_s=self._home.start_timeout_s)
            except BaseException:
                # Also when cancelled: kill the worker, because no task would ever call it.
                worker.process.kill()
                await worker.until_dead()
                raise
            return _Outcome.STARTED

    async def _launch(self, grant: Grant) -> LocalWorker:
        holds, holds_of_worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, channel_of_worker = socket.socketpair()
        listener = socket.create_server((self._home.address, 0))
        log_path = self._home.log_dir / f"worker-{quote(grant.gpu, safe='').replace('%2F', '-')}.log"
        home = self._home
        spec = WorkerSpec(entry=home.entry, grant=grant, log_path=log_path, env=home.env, works_for=home.works_for)
        try:
            if not grant.stands_by:
                hand_over(self._gate.acquire(grant), holds)
            fds = WorkerFds(channel_of_worker.fileno(), holds_of_worker.fileno(), listener.fileno())
            process = await self._launcher.launch(spec, fds)
        except BaseException:
            channel.close()
            holds.close()
            raise
        finally:
            holds_of_worker.close()
            channel_of_worker.close()
            host, port = listener.getsockname()[:2]
            listener.close()
        worker = LocalWorker(grant, process, log_path=log_path, on_spans=self._write_spans, holds=holds)
        await worker.attach(channel)
        self._workers[grant.gpu] = worker
        self._stores[grant.gpu] = (host, port)
        watch = asyncio.create_task(self._watch(worker), name=f"watch-{grant.gpu}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return worker

    async def _watch(self, worker: LocalWorker) -> None:
        status = await worker.until_dead()
        if self._workers.get(worker.grant.gpu) is worker:
            del self._workers[worker.grant.gpu]
            del self._stores[worker.grant.gpu]
        if not worker.ends_quietly:
            await self._on_death(worker.grant, status, worker.why)

    async def _stop(self, grant: Grant) -> None:
        async with self._locks[grant.gpu]:
            worker = self._workers.get(grant.gpu)
            if worker is None or worker.grant.stands_by != grant.stands_by or worker.grant.token > grant.token:
                return
            has_left = await worker.stop(timeout_s=self._home.stop_timeout_s)
            if not grant.stands_by:
                await self._until_free(worker, "died")
                if has_left:
                    self._write_release(worker.grant)

    async def _stand_down(self, grant: Grant) -> None:
        async with self._locks[grant.gpu]:
            worker = self._worker(grant)
            await worker.stand_down(timeout_s=self._home.stop_timeout_s)
            await self._until_free(worker, "stood down")
            self._write_release(grant)

    async def _until_free(self, worker: LocalWorker, done: str) -> None:
        gpu, timeout_s = worker.grant.gpu, self._home.stop_timeout_s
        if not await asyncio.to_thread(self._gate.wait_until_free, gpu, timeout_s=timeout_s):
            raise GateClosed(
                f"{gpu} is still held {timeout_s:g} s after its worker {worker.process.pid} {done}: a process that it "
                "started keeps the descriptor; end that process"
            )

    def _write_spans(self, grant: Grant, spans: Sequence[wire.Span]) -> None:
        lines = [
            json.dumps(
                {"gpu": grant.gpu, "state": span.state, "start_ns": span.start_ns, "end_ns": span.end_ns}
                | ({"work": dict(span.work)} if span.work else {})
            )
            for span in spans
        ]
        self._append(lines)

    def _write_release(self, grant: Grant) -> None:
        self._append([json.dumps({"gpu": grant.gpu, "released_ns": time.monotonic_ns()})])

    def _append(self, lines: Sequence[str]) -> None:
        try:
            append_lines(self._home.timeline, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            # A full disk costs the timeline its spans, not the worker its life. Log it once until writing works again.
            if self._reports_timeline_faults:
                self._log.warning("timeline not written", path=str(self._home.timeline), error=str(error))
            self._reports_timeline_faults = False
        else:
            self._reports_timeline_faults = True
