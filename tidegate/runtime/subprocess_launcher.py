"""Workers as plain subprocesses: a new interpreter for each worker, where a fork is impossible (CUDA).

The command of such a worker:
    python -m tidegate.runtime.subprocess_launcher SPEC CHANNEL_FD HOLD_FD STORE_FD PARENT_PID

Call `launch` on a thread that lives as long as the service: the kernel kills a worker when the thread that started it
ends.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

from tidegate.runtime.child import die_with_parent, run_worker_process
from tidegate.runtime.launch import (
    ALLOWED_PREFIXES,
    LauncherGone,
    LaunchRefused,
    WorkerFds,
    WorkerProcess,
    WorkerSpec,
    check_entry,
)


class SubprocessLauncher:
    """Starts each worker with this interpreter and its `sys.path`."""

    def __init__(self, *, allow: Sequence[str] = ()) -> None:
        self._allowed = (*ALLOWED_PREFIXES, *allow)
        self._running: set[WorkerProcess] = set()
        self._is_open = True

    async def launch(self, spec: WorkerSpec, fds: WorkerFds) -> WorkerProcess:
        if not self._is_open:
            raise LauncherGone("this launcher was closed")
        try:
            check_entry(spec.entry, self._allowed)
        except ValueError as error:
            raise LaunchRefused(str(error)) from error
        numbers = [str(number) for number in (*fds.in_order(), os.getpid())]
        process = subprocess.Popen(  # noqa: ASYNC220 # it returns at the exec, and must be called on this thread
            [sys.executable, "-m", "tidegate.runtime.subprocess_launcher", spec.to_json(), *numbers],
            pass_fds=fds.in_order(),
            stdin=subprocess.DEVNULL,
            # Set the variable before the interpreter and its libraries start.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **spec.env},
        )

        async def reaped() -> int | None:
            self._running.discard(worker)
            return process.wait()

        worker = WorkerProcess(process.pid, os.pidfd_open(process.pid), reaped)
        self._running.add(worker)
        return worker

    async def close(self) -> None:
        self._is_open = False
        running = list(self._running)
        for worker in running:
            worker.kill()
        await asyncio.gather(*(worker.wait() for worker in running))


def main(arguments: Sequence[str]) -> int:
    text, *numbers = arguments
    channel, holds, store_listener, parent_pid = map(int, numbers)
    die_with_parent(parent_pid)
    for fd in (channel, holds, store_listener):
        os.set_inheritable(fd, False)
    return run_worker_process(WorkerSpec.parse(text), WorkerFds(channel, holds, store_listener))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
