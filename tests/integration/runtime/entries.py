"""What the workers of these tests run. Each is an entry of a worker process."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator

from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.v1 import workers_pb2 as wire


class Echo:
    """Tells about its process. WarmUp streams its steps; Train fails as its update id says; Save never ends."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        kind = call.WhichOneof("body")
        if kind == "start_engine":
            yield Answer(call.call_id, wire.Started(detail=str(self._about(call.start_engine.config_json))))
        elif kind == "warm_up":
            for step in range(call.warm_up.num_steps):
                progress = wire.WarmUpProgress(step=step, num_steps=call.warm_up.num_steps)
                yield Answer(call.call_id, progress, last=step + 1 == call.warm_up.num_steps)
        elif kind == "train":
            if call.train.update_id == "refused":
                raise CallRefused("this update does not fit")
            raise RuntimeError("this update broke the worker")
        elif kind == "save":
            signal.pause()

    def _about(self, what: str) -> object:
        if what == "pid":
            return os.getpid()
        if what == "fds":
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            return sorted(os.readlink(link).split(":")[0] for link in links if os.path.lexists(link))
        if what == "random":
            return random.random()
        if what == "signals":
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
            return [signal.getsignal(number) is signal.SIG_DFL for number in numbers]
        if what == "stdin":
            return repr(sys.stdin.read())
        if what == "listener":
            assert self._channel.store_listener is not None
            return self._channel.store_listener.getsockname()[1]
        return os.environ.get(what, "")


def echo(channel: WorkerChannel) -> None:
    print("echo", channel.grant.gpu, "is here")
    run_worker(channel, Echo(channel), waits_for="prompts")


def leave(channel: WorkerChannel) -> None:
    sys.exit(int(os.environ["LEAVE_WITH"]))


def fail(channel: WorkerChannel) -> None:
    raise RuntimeError("it went wrong on purpose")
