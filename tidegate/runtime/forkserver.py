"""A node's fork server: it imports torch and megatron once, then forks one worker for each request.

    python -m tidegate.runtime.forkserver --socket PATH [--preload NAME,...] [--allow PREFIX]... [--owner-pid PID]

The process has one thread, no gRPC and no asyncio, so that a fork copies a whole process. On CUDA its libraries add a
thread that waits, and there is no CUDA context: each worker makes its own (ADR 0044). `--preload` names modules to
import and module:function to call, in this order.

A packet on the socket is a `WorkerSpec` as JSON with the three descriptors of `WorkerFds`. The answers are packets of
JSON: {"id", "pid"} with a pidfd, {"id", "refused"}, and later {"pid", "status"}.

Invariants:
- A worker inherits none of the server's sockets, and no other worker's descriptors.
  [test_worker_launcher: own_descriptors_and_no_others]
- When a connection closes, its service is dead, and the workers requested on it are killed.
  [test_fork_server: the_death_of_a]
- When the owner dies or SIGTERM comes, all workers are killed and the server leaves.
  [test_fork_server: dies_with_its_owner]
- When the server dies, the kernel kills its workers. [test_fork_server: workers_die_with_the]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.runtime.child import die_with_parent, run_worker_process
from tidegate.runtime.launch import ALLOWED_PREFIXES, WorkerFds, WorkerSpec, check_entry, resolve
from tidegate.runtime.unix_socket import bound_listener

MAX_REQUEST_BYTES = 128 * 1024
_NUM_FDS = 3
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(slots=True)
class ForkServer:
    """Serves until the owner dies or a signal comes. `allowed` are the prefixes of the entries that may run."""

    listener: socket.socket
    allowed: Sequence[str]
    owner_pidfd: int
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _workers: dict[int, socket.socket] = field(default_factory=dict)
    _wake: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    _leaving: bool = False

    def serve(self) -> None:
        """Returns when the owner is dead or SIGTERM came. Then no worker lives."""
        woken, waker = self._wake
        for end in self._wake:
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)
        for watched in (self.listener, woken, self.owner_pidfd):
            self._selector.register(watched, selectors.EVENT_READ)
        while not self._leaving:
            for key, _ in self._selector.select():
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj is woken:
                    woken.recv(4096)
                    self._reap()
                elif key.fileobj == self.owner_pidfd:
                    self._leaving = True
                elif isinstance(key.fileobj, socket.socket):
                    self._serve_connection(key.fileobj)
        self._kill_workers(list(self._workers))

    def _leave(self, *_: object) -> None:
        self._leaving = True

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve_connection(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds, flags, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, _NUM_FDS)
            if data:
                self._answer(connection, data, fds, is_cut=bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))
            else:
                self._drop(connection)
        # The service is gone, or it leaves hundreds of answers unread, which is as good as gone.
        except OSError:
            self._drop(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, connection: socket.socket, data: bytes, fds: list[int], *, is_cut: bool) -> None:
        request_id = None
        try:
            if is_cut or len(fds) != _NUM_FDS:
                raise ValueError(f"a request has {_NUM_FDS} descriptors and at most {MAX_REQUEST_BYTES} bytes")
            head, _, text = data.partition(b"\n")
            request_id = int(head)
            spec = WorkerSpec.parse(text)
            check_entry(spec.entry, self.allowed)
        except ValueError as error:
            connection.send(json.dumps({"id": request_id, "refused": str(error)}).encode())
            return
        pid = self._fork(spec, WorkerFds(*fds))
        self._workers[pid] = connection
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(connection, [json.dumps({"id": request_id, "pid": pid}).encode()], [pidfd])
        finally:
            os.close(pidfd)

    def _fork(self, spec: WorkerSpec, fds: WorkerFds) -> int:
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with_parent(server_pid)
                signal.set_wakeup_fd(-1)
                self._close_sockets()
                status = run_worker_process(spec, fds)
            finally:
                # Never return into the server's loop, whatever was raised.
                os._exit(status)
        return pid

    def _close_sockets(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake[1].close()
        self._selector.close()
        os.close(self.owner_pidfd)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._kill_workers([pid for pid, requested_on in self._workers.items() if requested_on is connection])

    def _kill_workers(self, pids: list[int]) -> None:
        """The children are not reaped yet, so their pids cannot name other processes."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
            del self._workers[pid]

    def _reap(self) -> None:
        for pid, connection in list(self._workers.items()):
            reaped, wait_status = os.waitpid(pid, os.WNOHANG)
            if reaped == pid:
                del self._workers[pid]
                report = {"pid": pid, "status": os.waitstatus_to_exitcode(wait_status)}
                # A service that is gone or takes no answers is dropped when the server reads its connection.
                with contextlib.suppress(OSError):
                    connection.send(json.dumps(report).encode())


def preload(names: Sequence[str]) -> None:
    """Imports each module and calls each module:function, in order. Libraries get one thread; none may keep running."""
    for variable in _ONE_THREAD:
        os.environ.setdefault(variable, "1")
    for name in names:
        if ":" in name:
            resolve(name)()
        else:
            __import__(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1 and not (torch is not None and are_of_cuda(torch, num_of_python=threading.active_count())):
        raise SystemExit(
            f"tidegate forkserver: {num_threads} threads run after preloading {', '.join(names)}; a fork would lose "
            f"{num_threads - 1} of them and keep their locks: preload only modules that start no thread"
        )


def are_of_cuda(torch: Any, *, num_of_python: int) -> bool:
    """Whether further threads are those that the libraries of CUDA start when they are loaded: they wait, and a worker
    makes a context of its own. A context of this process would be lost in a fork."""
    return torch.version.cuda is not None and not torch.cuda.is_initialized() and num_of_python == 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidegate.runtime.forkserver", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="where to listen")
    parser.add_argument("--preload", default="", help="modules to import, module:function to call, separated by commas")
    parser.add_argument("--allow", action="append", default=[], help="a prefix of further entries that may run")
    parser.add_argument("--owner-pid", type=int, default=os.getppid(), help="leave when this process ends")
    options = parser.parse_args(arguments)
    owner_pidfd = os.pidfd_open(options.owner_pid)
    preload([name for name in options.preload.split(",") if name])
    # Every object alive now stays for good. A collector that never touches these objects leaves their pages shared.
    gc.freeze()
    listener = bound_listener(options.socket)
    try:
        ForkServer(listener, (*ALLOWED_PREFIXES, *options.allow), owner_pidfd).serve()
    finally:
        options.socket.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
