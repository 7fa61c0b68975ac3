"""Runs a command that dies with its parent: `python -I -S tied.py PARENT_PID COMMAND ARG...`.

The kernel is asked to kill this process when its parent dies, then the command takes its place (same pid). A separate
program rather than a `preexec_fn`, which may deadlock in a parent that has threads. Linux; the request survives the
exec and is not inherited by the command's own children. "Parent" is the thread that started this: start it from one
that lives as long as the process.
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
    if os.getppid() != parent_pid:  # it died before the request
        sys.exit(f"the parent {parent_pid} of {sys.argv[2]} is gone")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
