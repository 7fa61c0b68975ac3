"""The worker's side of its channel: takes calls, answers them, reports what its slot did, and dies with its service.

An entry is a function `def main(channel: WorkerChannel) -> None` that ends in `run_worker(channel, handler)`. The loop
takes one call at a time. Some handlers have a stepper (an engine): the loop steps it between calls while it is busy,
and a step may answer calls that the handler left open.

The meaning of an exception:
- `CallRefused`: the call was wrong and changed nothing. The worker goes on.
- Any other exception: the state of this process is unknown. The reply is `fatal`, and the worker ends with status 1.

A standby is a worker like any other that has passed no gate, or gave its GPU back.

Invariants:
- Each call is answered by exactly one reply with `last`. [test_worker: answers_each_in_its_own_time]
- Every reply carries all spans up to it. [test_worker: each_span_is_reported]
- A worker whose service is gone ends itself, in the middle of a call too.
  [test_worker_launcher: closes_the_channel_while_it_works]
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tidegate.runtime.call_work import CallWork, Work
from tidegate.runtime.channel import BlockingChannel, ChannelClosed
from tidegate.runtime.slot_clock import SlotClock, SlotState, waiting_for
from tidegate.types import Grant
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire

ReplyBody: TypeAlias = (
    wire.Started
    | wire.UpdateReport
    | wire.PublishedShard
    | wire.SavedShard
    | types_pb2.ReshardReport
    | wire.Committed
    | wire.Generated
    | wire.EngineLoad
    | wire.Aborted
    | wire.Scored
    | wire.LoadedWeights
    | wire.WarmUpProgress
    | wire.Suspended
    | wire.BuiltAhead
)

READY_CALL_ID = 0
"""The id of the reply that a worker sends by itself when it is ready for calls. Calls are numbered from 1."""
ORPHANED_STATUS = 70
"""The exit status of a worker that ended itself because its service was gone."""

_MEMORY_REMEDY = (
    "let the slot hold less by actor.micro_batch_size, actor.recompute, rollout.max_running_requests or a layout over "
    "more GPUs, or lower cluster.slots_per_gpu"
)
_FIELD_OF_BODY = {
    field.message_type.full_name: field.name
    for field in wire.WorkerReply.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}
_STATE_OF_CALL = {
    "join_world": SlotState.STARTING,
    "start_actor": SlotState.STARTING,
    "start_engine": SlotState.STARTING,
    "start_scorer": SlotState.STARTING,
    "warm_up": SlotState.TRAINING,
    "train": SlotState.TRAINING,
    "accumulate": SlotState.TRAINING,
    "publish": SlotState.PUBLISHING,
    "save": SlotState.SAVING,
    "export": SlotState.SAVING,
    "build_ahead": SlotState.BUILDING,
    "prepare_reshard": SlotState.SWITCHING,
    "commit_reshard": SlotState.SWITCHING,
    "abort_reshard": SlotState.SWITCHING,
    "prepare_suspension": SlotState.SWITCHING,
    "commit_suspension": SlotState.SWITCHING,
    "abort_suspension": SlotState.SWITCHING,
    "generate": SlotState.GENERATING,
    "abort": SlotState.DRAINING,
    "score": SlotState.COMPUTING_LOG_PROBS,
    "load_shards": SlotState.LOADING_WEIGHTS,
}


class CallRefused(RuntimeError):
    """The call cannot be done, and nothing was changed. The message says why and gives the remedy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply to an open call. `last` closes the call."""

    call_id: int
    body: ReplyBody | None = None
    last: bool = True


class Handler(Protocol):
    """Does a worker's calls."""

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        """Does the call. A call without an answer gets an empty one, or a later step answers it where there is one."""
        ...


class Stepper(Protocol):
    """Work that goes on between calls."""

    @property
    def busy(self) -> bool:
        """Whether there is something to do. Then the loop does not wait for a call."""
        ...

    def step(self) -> Iterator[Answer]:
        """Does a little. It must be short, because calls wait for its end."""
        ...


class WorkerChannel:
    """A worker's calls and replies, and the other resources from its service. One thread uses it."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        grant: Grant,
        clock: SlotClock,
        store_listener: socket.socket | None = None,
        holds: socket.socket | None = None,
    ) -> None:
        """The resources of a worker.

        - `grant`: the grant that the worker was started under.
        - `store_listener`: bound and listening, for the torch store of a world that this worker leads.
        - `holds`: its queue has the locks of the worker's GPU, as long as it lives or until it gives them back.
        """
        self.grant = grant
        self.clock = clock
        self.store_listener = store_listener
        self._holds = holds
        if holds is not None:
            holds.setblocking(False)
        self._channel = BlockingChannel(sock, wire.WorkerCall)

    def next_call(self, timeout_s: float | None) -> wire.WorkerCall | None:
        """The next call. None when none came within `timeout_s` (None waits for ever, 0 only looks)."""
        return self._channel.receive(timeout_s)

    def stand_down(self) -> None:
        """Gives the GPU back: its gate is free."""
        if self._holds is None:
            raise CallRefused("this worker was started without a way to give its GPU back; stop it instead")
        with contextlib.suppress(BlockingIOError):
            while True:
                _, locks, _, _ = socket.recv_fds(self._holds, 1, 1)
                for lock in locks:
                    os.close(lock)
                if not locks:
                    return

    def ready(self) -> None:
        """Reports to the service that calls may come."""
        self.send(Answer(READY_CALL_ID))

    def reply(self, call: wire.WorkerCall, body: ReplyBody | None = None, *, last: bool = True) -> None:
        self.send(Answer(call.call_id, body, last))

    def send(self, answer: Answer) -> None:
        reply = wire.WorkerReply(call_id=answer.call_id, last=answer.last)
        if answer.body is not None:
            getattr(reply, _FIELD_OF_BODY[answer.body.DESCRIPTOR.full_name]).CopyFrom(answer.body)
        is_response = isinstance(answer.body, wire.Generated)
        self._send(reply, num_tokens=len(reply.generated.sample.response_tokens) if is_response else 0)

    def fail(self, call: wire.WorkerCall, error: str, *, fatal: bool = False) -> None:
        """Answers that the call failed. Unless `fatal`, the call changed nothing."""
        self._send(
            wire.WorkerReply(call_id=call.call_id, last=True, error=error or "failed without a message", fatal=fatal)
        )

    def _send(self, reply: wire.WorkerReply, *, num_tokens: int = 0) -> None:
        reply.spans.extend(
            wire.Span(state=span.state, start_ns=span.start_ns, end_ns=span.end_ns, work=dict(span.work))
            for span in self.clock.take(num_tokens=num_tokens)
        )
        self._channel.send(reply)


def run_worker(
    channel: WorkerChannel, handler: Handler, *, stepper: Stepper | None = None, waits_for: str = "call"
) -> None:
    """Serves calls until Stop, or until the service is gone. `waits_for` names what an idle slot waits for.

    An exception that is no `CallRefused` is raised again after its answer.
    """
    idle, work = waiting_for(waits_for), CallWork()
    channel.clock.enter(idle)
    channel.ready()
    while True:
        busy = stepper is not None and stepper.busy
        if not busy:
            channel.clock.enter(idle)
        try:
            call = channel.next_call(0.0 if busy else None)
        except ChannelClosed:
            return
        if call is None:
            assert stepper is not None
            channel.clock.enter(SlotState.GENERATING, work.of_steps())
            for answer in stepper.step():
                channel.send(answer)
        elif call.WhichOneof("body") == "stop":
            channel.reply(call)
            return
        elif call.WhichOneof("body") == "stand_down":
            channel.stand_down()
            channel.reply(call)
        else:
            _serve(channel, handler, call, work.of_call(call), ends_open=stepper is None)


def _serve(channel: WorkerChannel, handler: Handler, call: wire.WorkerCall, work: Work, *, ends_open: bool) -> None:
    kind = call.WhichOneof("body")
    is_open = True
    with channel.clock.during(_STATE_OF_CALL.get(kind or "", channel.clock.state), work):
        try:
            for answer in handler.handle(call):
                channel.send(answer)
                is_open = is_open and not (answer.call_id == call.call_id and answer.last)
            if is_open and ends_open:
                channel.reply(call)
        except CallRefused as refusal:
            channel.fail(call, str(refusal))
        except ChannelClosed:
            raise
        except Exception as error:
            reason = f"{kind} failed in the worker of {channel.grant.gpu}: {_description(error)}"
            channel.fail(call, reason, fatal=True)
            raise


def _description(error: Exception) -> str:
    # By name: whether torch is imported here is the component's affair.
    if type(error).__name__ == "OutOfMemoryError":
        said = str(error)
        limit = re.search(r"[\d.]+ \w+ allowed", said)
        what = ". ".join(said.split(". ")[:3]) + (f", {limit.group()} in a process" if limit else "")
        return f"{what}: {_MEMORY_REMEDY}"
    return "".join(traceback.format_exception_only(error)).strip()


def die_with_service(sock: socket.socket) -> None:
    """From now on this process ends at once when the other end of `sock` closes, whatever its main thread does.

    A thread waits in poll() for the hang-up and needs the interpreter lock only to leave. torch's operators and gloo's
    collectives release that lock while they work. The thread reads nothing from the socket.
    """
    watched = os.dup(sock.fileno())
    threading.Thread(target=_exit_on_hang_up, args=(watched,), name="die-with-service", daemon=True).start()


def _exit_on_hang_up(watched: int) -> None:
    hang_up = select.poll()
    hang_up.register(watched, select.POLLRDHUP)
    hang_up.poll()
    os._exit(ORPHANED_STATUS)
