"""One worker process as its service sees it: calls go out, replies come in, its death is seen once.

Replies are assigned by call id. The id on the channel is this module's own; the caller gets its own id back.

Invariants:
- Every call ends: by its last reply, by its deadline, or by `WorkerGone`.
  [test_instance_port: call_past_its_deadline]
- No reply reaches two calls. [test_instance_port: calls_to_one_worker_do_not_mix]
- Spans of the time in which a worker stands by are nobody's. [test_instance_port: owns_no_time_of_the_slot]
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from tidegate.gate import GateHold
from tidegate.runtime.channel import AsyncChannel, ChannelClosed
from tidegate.runtime.crew import WorkerGone, WorkerRefused
from tidegate.runtime.launch import WorkerProcess
from tidegate.runtime.worker import READY_CALL_ID
from tidegate.types import NO_TOKEN, Grant
from tidegate.v1 import workers_pb2 as wire

OnSpans = Callable[[Grant, Sequence[wire.Span]], None]
_Replies = asyncio.Queue[wire.WorkerReply | None]
"""None: the worker is gone."""
_DRAIN_S = 1.0
"""The time for the last replies of a dead worker. A process that it forked may keep the channel open for longer."""


class LocalWorker:
    """A started process. Call `attach` first."""

    def __init__(
        self, grant: Grant, process: WorkerProcess, *, log_path: Path, on_spans: OnSpans, holds: socket.socket
    ) -> None:
        """`holds` is the service's end of the socket in whose queue the worker's lock lies."""
        self.grant = grant
        self._held_since_ns = 0
        """When a worker that stood by took the GPU, on the clock of its spans."""
        self._holds = holds
        self.process = process
        self.ends_quietly = True
        """Whether its end needs no report: it is not ready yet, or the service has asked it to stop."""
        self.why = ""
        """The error of which it ends, in its own words. Empty: it did not say."""
        self._log_path = log_path
        self._on_spans = on_spans
        self._ids = itertools.count(READY_CALL_ID + 1)
        self._open: dict[int, _Replies] = {READY_CALL_ID: asyncio.Queue()}
        self._exit_status: int | None = None

    async def attach(self, sock: socket.socket) -> None:
        """Takes over the service's end of the channel."""
        self._channel = await AsyncChannel.open(sock, wire.WorkerReply)
        self._life = asyncio.create_task(self._live(), name=f"worker-{self.grant.gpu}")

    @property
    def is_alive(self) -> bool:
        return not self._life.done()

    async def until_ready(self, *, timeout_s: float) -> None:
        """WorkerGone when it died first, TimeoutError when it needs longer."""
        async with asyncio.timeout(timeout_s):
            if await self._open[READY_CALL_ID].get() is None:
                raise self._gone()
        del self._open[READY_CALL_ID]
        self.ends_quietly = False

    async def call(self, call: wire.WorkerCall, *, timeout_s: float) -> AsyncGenerator[wire.WorkerReply, None]:
        """Yields the replies as they come. WorkerRefused (nothing changed), WorkerGone or TimeoutError.

        After a TimeoutError the worker may still do the call. Later replies are dropped.
        """
        if not self.is_alive:
            raise self._gone()
        call_id, replies = next(self._ids), _Replies()
        self._open[call_id] = replies
        deadline = asyncio.get_running_loop().time() + timeout_s
        sent = wire.WorkerCall()
        sent.CopyFrom(call)
        sent.call_id = call_id
        try:
            await self._send(sent, deadline, timeout_s)
            while True:
                reply = await self._next(replies, deadline, call, timeout_s)
                reply.call_id = call.call_id
                yield reply
                if reply.last:
                    return
        finally:
            del self._open[call_id]

    async def take_gpu(self, hold: GateHold) -> None:
        """Hands the hold to the worker: the GPU is the worker's now. WorkerGone when it is dead: the GPU is free."""
        try:
            hand_over(hold, self._holds)
        except OSError as error:
            await self.until_dead()
            raise WorkerGone(
                f"the worker that stands by on {hold.grant.gpu} cannot take it under {hold.grant.token}: it is dead "
                f"({error}; its log: {self._log_path})"
            ) from error
        self.grant, self._held_since_ns = hold.grant, time.monotonic_ns()

    async def stand_down(self, *, timeout_s: float) -> None:
        """The worker frees its gate and lives on. WorkerRefused, WorkerGone or TimeoutError."""
        call = wire.WorkerCall(stand_down=wire.StandDown())
        async with aclosing(self.call(call, timeout_s=timeout_s)) as replies:
            async for _ in replies:
                pass
        self.grant = Grant(self.grant.gpu, NO_TOKEN)

    async def stop(self, *, timeout_s: float) -> bool:
        """Asks the worker to leave and kills it when it has not by then. Returns once it is dead.

        True where it left by itself."""
        self.ends_quietly = True
        try:
            async with asyncio.timeout(timeout_s):
                stop = wire.WorkerCall(stop=wire.Stop())
                async with aclosing(self.call(stop, timeout_s=timeout_s)) as replies:
                    async for _ in replies:
                        pass
                await self.until_dead()
        # The worker must end either way: kill one that does not leave.
        except (TimeoutError, WorkerGone, WorkerRefused):
            self.process.kill()
            await self.until_dead()
            return False
        return True

    async def until_dead(self) -> int:
        """Waits for the death. Returns the exit status."""
        return await asyncio.shield(self._life)

    async def _send(self, call: wire.WorkerCall, deadline: float, timeout_s: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._channel.send(call)
        except ChannelClosed:
            await self.until_dead()
            raise self._gone() from None
        except TimeoutError:
            raise self._late(call, timeout_s) from None

    async def _next(
        self, replies: _Replies, deadline: float, call: wire.WorkerCall, timeout_s: float
    ) -> wire.WorkerReply:
        try:
            async with asyncio.timeout_at(deadline):
                reply = await replies.get()
        except TimeoutError:
            raise self._late(call, timeout_s) from None
        if reply is None:
            raise self._gone()
        if reply.fatal:
            raise WorkerGone(f"{reply.error} (log: {self._log_path})")
        if reply.error:
            raise WorkerRefused(reply.error)
        return reply

    async def _live(self) -> int:
        reading = asyncio.create_task(self._read())
        dying = asyncio.create_task(self.process.wait())
        await asyncio.wait({reading, dying}, return_when=asyncio.FIRST_COMPLETED)
        # A worker without its channel is of no use. It leaves by itself only if its watcher can run.
        self.process.kill()
        status = await dying
        await asyncio.wait({reading}, timeout=_DRAIN_S)
        reading.cancel()
        self._channel.close()
        self._holds.close()
        # The status is unknown only if the fork server is dead. Then the kernel killed its workers.
        self._exit_status = -signal.SIGKILL if status is None else status
        for replies in self._open.values():
            replies.put_nowait(None)
        return self._exit_status

    async def _read(self) -> None:
        try:
            while True:
                reply = await self._channel.receive()
                if reply.fatal:
                    self.why = reply.error
                if spans := self._own(reply.spans):
                    self._on_spans(self.grant, spans)
                if (replies := self._open.get(reply.call_id)) is not None:
                    replies.put_nowait(reply)
        except ChannelClosed:
            return

    def _own(self, spans: Sequence[wire.Span]) -> list[wire.Span]:
        """The spans of the time in which the worker has the GPU."""
        if self.grant.stands_by:
            return []
        own = [span for span in spans if span.end_ns > self._held_since_ns]
        if own and own[0].start_ns < self._held_since_ns:
            own[0].start_ns = self._held_since_ns
        return own

    def _gone(self) -> WorkerGone:
        return WorkerGone(
            f"the worker of {self.grant.gpu} ended with status {self._exit_status}; its log {self._log_path} says why"
        )

    def _late(self, call: wire.WorkerCall, timeout_s: float) -> TimeoutError:
        kind = call.WhichOneof("body")
        return TimeoutError(f"the worker of {self.grant.gpu} did not answer {kind} within {timeout_s:g} s")


def hand_over(hold: GateHold, holds: socket.socket) -> None:
    """Puts the lock into the queue of the worker's socket.

    From now on the lock lasts as long as the queue, or until the worker takes it out and closes it. OSError where
    nobody can take it out any more: then the lock is free.
    """
    try:
        socket.send_fds(holds, [b"h"], [hold.fileno()])
    finally:
        hold.close()
