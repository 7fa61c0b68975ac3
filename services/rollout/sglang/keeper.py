"""Runs one SGLang server and leaves nothing of it behind: `python -I -S keeper.py OWNER_PID LAUNCHER COMMAND ARG...`.

LAUNCHER is the path of `tidegate.runtime.dies_with_parent`, through which the command runs. The keeper does the
following:
1. It waits for the owner's end, the server's end, or SIGTERM.
2. It kills all processes of the server and removes their shared memory.
3. It ends with the server's status.

The keeper is a program of its own for two reasons. The owner may be killed. And a child of the server that is still
starting would outlive both, because SGLang ties it to its parent only later.

Invariant: the server is a process group of its own, which its children do not leave, and dies with the keeper.
[test_sglang_keeper: no_process_and_no_shared_memory_remains]
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/sglang_"
_DEATH_TIMEOUT_MS = 5000
"""The wait for a killed process to end, with its memory."""


def main(owner_pid: int, launcher: str, command: list[str]) -> int:
    """The server's exit status, as subprocess returns it."""
    owner = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:
        return 1
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen([sys.executable, "-I", "-S", launcher, str(os.getpid()), *command], process_group=0)
    ends = select.poll()
    for end in (owner, woken, os.pidfd_open(server.pid)):
        ends.register(end, select.POLLIN)
    ends.poll()
    end_group(server.pid)
    return server.wait()


def end_group(group: int) -> None:
    """Kill the group's processes and remove their shared memory. Returns when they ended."""
    members = _members(group)
    files = [path for pid in members for path in shared_memory(pid)]
    pidfds = []
    for pid in members:
        with suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for pidfd in pidfds:
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        end.poll(_DEATH_TIMEOUT_MS)
        os.close(pidfd)
    for path in files:
        path.unlink(missing_ok=True)


def _members(group: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with suppress(ProcessLookupError):
            if name.isdecimal() and os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def shared_memory(pid: int) -> set[Path]:
    """SGLang's shared memory files that the process has open. Only an orderly end of SGLang would remove them."""
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if _SHARED_MEMORY in line}
    return set()


if __name__ == "__main__":
    status = main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)
