"""Runs a command that dies with its parent: `python -I -S dies_with_parent.py PARENT_PID COMMAND ARG...`.

1. The program asks the kernel to kill this process when its parent dies.
2. The command takes its place (same pid).

It is a separate program and not a `preexec_fn`, which may deadlock in a parent that has threads. Linux only. The
request survives the exec, and the command's own children do not inherit it. "Parent" is the thread that started this
program: start it from a thread that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid = int(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie {sys.argv[2]} to its parent: prctl failed with errno {ctypes.get_errno()}")
    if os.getppid() != parent_pid:  # the parent died before the request
        sys.exit(f"the parent {parent_pid} of {sys.argv[2]} is gone")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
