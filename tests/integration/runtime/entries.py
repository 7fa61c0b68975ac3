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
            yield Answer(call.call_id, wire.Started(detail=str(_about(call.start_engine.config_json))))
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


def _about(what: str) -> object:
    if what == "fds":
        return sorted(
            os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if _is_open(fd)
        )
    if what == "random":
        return random.random()
    if what == "signals":
        return [
            signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        ]
    if what == "stdin":
        return repr(sys.stdin.read())
    return os.environ.get(what, "")


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def echo(channel: WorkerChannel) -> None:
    print("echo", channel.grant.gpu, "is here")
    run_worker(channel, Echo(channel), waits_for="prompts")


def leave(channel: WorkerChannel) -> None:
    sys.exit(int(os.environ["LEAVE_WITH"]))


def fail(channel: WorkerChannel) -> None:
    raise RuntimeError("it went wrong on purpose")
