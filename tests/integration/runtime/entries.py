"""The entries that the workers of these tests run."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.v1 import workers_pb2 as wire


class Echo:
    """Describes its process. WarmUp streams its steps; Train fails as its update id says; Save never ends."""

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


def start_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def blocked_collective(channel: WorkerChannel) -> None:
    """A gradient, then a broadcast that rank 0 waits for in vain, on the store that the service reserved."""
    when = "before" if "torch" in sys.modules else "after"
    import torch
    from torch import distributed

    values = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad((values * values).sum(), [values])
    print(f"gradient {gradient.tolist()} with {torch.get_num_threads()} thread, imported {when} the fork")
    rank = int(os.environ["RANK"])
    assert channel.store_listener is not None
    store = distributed.TCPStore(  # type: ignore[attr-defined] # re-exported by torch without saying so
        "127.0.0.1",
        int(os.environ["STORE_PORT"]),
        is_master=rank == 0,
        master_listen_fd=channel.store_listener.detach() if rank == 0 else None,
        wait_for_workers=False,
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    channel.ready()
    if rank == 0:
        distributed.broadcast(torch.zeros(1), src=1)
    signal.pause()
