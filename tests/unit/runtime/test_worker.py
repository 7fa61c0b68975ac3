"""A worker's loop: every call is answered once, and an engine steps between calls."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Iterator

import pytest

from tidegate.runtime.channel import BlockingChannel
from tidegate.runtime.slot_clock import SlotClock
from tidegate.runtime.worker import Answer, WorkerChannel, run_worker
from tidegate.types import GpuId, Grant, Token
from tidegate.v1 import workers_pb2 as wire

Service = BlockingChannel[wire.WorkerReply]


@pytest.fixture
def ends() -> Iterator[tuple[Service, WorkerChannel]]:
    ours, theirs = socket.socketpair()
    ticks = itertools.count()
    with ours, theirs:
        grant = Grant(GpuId("n0/0"), Token(1, 1))
        worker = WorkerChannel(theirs, grant=grant, clock=SlotClock(lambda: next(ticks)))
        yield BlockingChannel(ours, wire.WorkerReply), worker


def calls(service: Service, *bodies: wire.WorkerCall) -> None:
    for call_id, body in enumerate(bodies, start=1):
        body.call_id = call_id
        service.send(body)


def answers(service: Service) -> list[tuple[int, bool, str]]:
    """(call, last, body or error) of all answers."""
    replies = []
    while (reply := service.receive(0)) is not None:
        replies.append((reply.call_id, reply.last, reply.error or reply.WhichOneof("body") or ""))
    return replies


class Countdown:
    """An engine: Generate requests a number of steps. Each step answers one token of every open call."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        if call.WhichOneof("body") == "abort":
            for call_id in sorted(self._left):
                yield Answer(call_id)
            self._left.clear()
            yield Answer(call.call_id)
        else:
            self._left[call.call_id] = len(call.generate.requests)

    def step(self) -> Iterator[Answer]:
        for call_id in sorted(self._left):
            self._left[call_id] -= 1
            yield Answer(call_id, wire.Generated(), last=self._left[call_id] == 0)
        self._left = {call_id: left for call_id, left in self._left.items() if left}


def generate(num_steps: int) -> wire.WorkerCall:
    return wire.WorkerCall(generate=wire.Generate(requests=[wire.GenerationRequest()] * num_steps))


def stop() -> wire.WorkerCall:
    return wire.WorkerCall(stop=wire.Stop())


def test_an_engine_takes_calls_while_it_works_and_answers_each_in_its_own_time(
    ends: tuple[Service, WorkerChannel],
) -> None:
    service, worker = ends
    engine = Countdown()
    calls(service, generate(2), generate(1), wire.WorkerCall(abort=wire.Abort()), stop())
    run_worker(worker, engine, stepper=engine)
    want = [(0, True, ""), (1, True, ""), (2, True, ""), (3, True, ""), (4, True, "")]
    assert answers(service) == want


def test_an_engine_steps_until_it_has_nothing_to_do(ends: tuple[Service, WorkerChannel]) -> None:
    service, worker = ends

    class StopsAfter(Countdown):
        def step(self) -> Iterator[Answer]:
            yield from super().step()
            if not self.busy:
                service.send(stop())

    engine = StopsAfter()
    calls(service, generate(2))
    run_worker(worker, engine, stepper=engine)
    assert answers(service) == [(0, True, ""), (1, False, "generated"), (1, True, "generated"), (0, True, "")]


class Silent:
    """Answers no call by itself."""

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        return iter(())


def test_a_call_that_its_handler_leaves_open_is_answered_empty(ends: tuple[Service, WorkerChannel]) -> None:
    service, worker = ends
    calls(service, wire.WorkerCall(save=wire.Save()), stop())
    run_worker(worker, Silent())
    assert answers(service) == [(0, True, ""), (1, True, ""), (2, True, "")]


def test_each_span_is_reported_once_and_names_the_work(ends: tuple[Service, WorkerChannel]) -> None:
    service, worker = ends
    calls(service, wire.WorkerCall(save=wire.Save()), wire.WorkerCall(publish=wire.Publish()), stop())
    run_worker(worker, Silent(), waits_for="minibatch")
    spans = []
    while (reply := service.receive(0)) is not None:
        spans += list(reply.spans)
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(spans))
    states = [state for state, _ in itertools.groupby(span.state for span in spans)]
    idle = "waiting_minibatch"
    assert states == ["starting", idle, "saving", idle, "publishing", idle]


class OutOfMemoryError(RuntimeError):
    """It has the name and the kind of torch's."""


MEMORY = (
    "CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 27.94 GiB is "
    "free. Process 1302 has 3.45 GiB memory in use. 16.48 GiB allowed; Of the allocated memory 16.26 GiB is allocated."
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (
            OutOfMemoryError(MEMORY),
            "CUDA out of memory. .* 27.94 GiB is free, 16.48 GiB allowed in a process: let the slot hold less",
        ),
    ],
    ids=["any error", "memory"],
)
def test_a_broken_call_is_answered_as_fatal_and_ends_the_loop(
    ends: tuple[Service, WorkerChannel], error: Exception, message: str
) -> None:
    service, worker = ends

    class Breaks(Silent):
        def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
            raise error

    calls(service, wire.WorkerCall(save=wire.Save()))
    with pytest.raises(type(error)):
        run_worker(worker, Breaks())
    ready, (call_id, is_fatal, said) = answers(service)
    assert ready == (0, True, "")
    assert (call_id, is_fatal) == (1, True)
    assert re.match(f"save failed in the worker of n0/0: {message}", said)
