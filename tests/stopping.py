"""Stops a child process for a while (SIGSTOP), so that it does nothing more once the call is over."""

from __future__ import annotations

import os
import signal


def stop(pid: int) -> None:
    """On a busy machine the threads of a process go on for milliseconds after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
