"""Keeps one SGLang server and leaves nothing of it behind: `python -I -S keeper.py OWNER_PID TIED COMMAND ARG...`.

TIED is the path of `tidegate.runtime.dies_with_parent`, through which the command runs. Whatever comes first, the
owner's end, the server's, or SIGTERM, ends all processes of the server and removes what they have in shared memory;
then the keeper ends
as the server did. A program of its own, since the owner may be killed, and since a child of the server that is still
starting would outlive both: SGLang ties it to its parent only later.
Invariant: the server is a process group of its own, which its children do not leave, and dies with the keeper.
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
_GONE_TIMEOUT_MS = 5000
"""For killed processes to be gone, and their memory with them."""


def main(owner_pid: int, tied: str, command: list[str]) -> int:
    """The server's exit status, as subprocess tells it."""
    owner = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:
        return 1
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen([sys.executable, "-I", "-S", tied, str(os.getpid()), *command], process_group=0)
    ends = select.poll()
    for end in (owner, woken, os.pidfd_open(server.pid)):
        ends.register(end, select.POLLIN)
    ends.poll()
    end_group(server.pid)
    return server.wait()


def end_group(group: int) -> None:
    """Returns when its processes are gone."""
    members = _members(group)
    left = [path for pid in members for path in shared_memory(pid)]
    gone = []
    for pid in members:
        with suppress(ProcessLookupError):
            gone.append(os.pidfd_open(pid))
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for pidfd in gone:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(_GONE_TIMEOUT_MS)
        os.close(pidfd)
    for path in left:
        path.unlink(missing_ok=True)


def _members(group: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with suppress(ProcessLookupError):
            if name.isdecimal() and os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def shared_memory(pid: int) -> set[Path]:
    """What the process has open there: only an orderly end of SGLang would remove it."""
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if _SHARED_MEMORY in line}
    return set()


if __name__ == "__main__":
    status = main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)
