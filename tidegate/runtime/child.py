"""Turns a new process, forked or spawned, into a worker: from bare descriptors to the call of its entry.

It also has a kernel call that Python lacks: die with the parent, and only with the intended parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from tidegate.runtime.launch import WorkerFds, WorkerSpec, resolve
from tidegate.runtime.process_title import set_process_title
from tidegate.runtime.slot_clock import SlotClock
from tidegate.runtime.worker import WorkerChannel, die_with_service

_PR_SET_PDEATHSIG = 1
RESET_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends; at once when `parent_pid` is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def run_worker_process(spec: WorkerSpec, fds: WorkerFds) -> int:
    """Calls the entry. Returns the exit status. The socket of the holds stays open as long as this process lives."""
    clock = SlotClock(time.monotonic_ns)
    status = 1
    try:
        take_log(spec.log_path)
        set_process_title(spec.title)
        for number in RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(spec.env)
        _reseed()
        channel_socket = socket.socket(fileno=fds.channel)
        die_with_service(channel_socket)
        channel = WorkerChannel(
            channel_socket,
            grant=spec.grant,
            clock=clock,
            store_listener=socket.socket(fileno=fds.store_listener),
            holds=socket.socket(fileno=fds.holds),
        )
        resolve(spec.entry)(channel)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 # the edge of the process: its log and its status show the cause
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def take_log(path: Path | str) -> None:
    """Everything that this process prints goes to the file, which only this user can read. Stdin has nothing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
    # Make new objects: the old ones may have bytes that the parent had not flushed, or a test's capture.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _reseed() -> None:
    """Avoid equal random numbers in the forks of one process."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
