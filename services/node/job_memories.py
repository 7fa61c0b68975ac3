"""The folders of jobs in an agent's host memory, as long as a process of the job runs here.

A folder that an agent made has `MARK`, with the address where that one listens. After a death the next agent there
removes it. One without it is a launcher's, and is removed where no launcher has its lock any more.

Invariants:
- Processes with another credential do not share a folder. [test_machine: waits_for_the_one_before]
- What a killed agent left goes with the start of the next one. [test_machine_reload: a_killed_agent_left]
- Another agent's folders stay. [test_job_memories: of_another_agent]
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath

from tidegate.certs.job_credentials import job_folders
from tidegate.launcher.left_memory import Removals, folders_in, left_by_launchers, own_name
from tidegate.launcher.lock import LOCK, held_by

MARK = "of-an-agent"


def _digest(files: Mapping[str, bytes]) -> str:
    texts = (f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(files.items()))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class JobMemories:
    def __init__(self, root: Path, credentials: Mapping[Path, str] | None = None) -> None:
        """`credentials`: digests of those that processes have under this agent's earlier program, by folder."""
        self.root = root.resolve()
        self._mark = b""
        self._users: Counter[Path] = Counter()
        self._credentials: dict[Path, str] = dict(credentials or {})
        self._removals = Removals()
        self._removals.go_on(self.root)

    def begin(self, listens: str) -> None:
        """Removes what was left by launchers here, and by an agent that listened where this one, and no other, does."""
        self._mark = f"{listens} {_network()}".encode()
        in_use = {folder.name for folder in self._users}
        left = {*left_by_launchers(self.root), *filter(self._is_own, folders_in(self.root))}
        for folder in left:
            if folder.name not in in_use:
                self._removals.begin(folder)

    @property
    def credentials(self) -> Mapping[Path, str]:
        """A digest of what the processes of each job have, by its folder."""
        return self._credentials

    def check(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """ValueError for a folder that is not of this agent, or a file that is no credential."""
        own = re.compile(rf"{own_name()}[0-9a-f]+")
        if folder.parent.resolve() != self.root or not own.fullmatch(folder.name):
            raise ValueError(
                f"the job's folder in host memory is {folder}, and this agent makes folders of user {os.getuid()} in "
                f"{self.root}: give it the same --host-memory-root as runtime.host_memory_root, and the same user"
            )
        for path in files:
            if folder / PurePosixPath(path).parent not in job_folders(folder):
                raise ValueError(f"{path!r} is no file of a job's credential")

    def have_room(self, folder: Path, files: Mapping[str, bytes]) -> bool:
        """Whether no process of an earlier start of the job is left, which has another credential."""
        return not self._users[folder] or self._credentials[folder] == _digest(files)

    @asynccontextmanager
    async def of_job(self, folder: Path, files: Mapping[str, bytes]) -> AsyncIterator[None]:
        """ValueError, OSError."""
        if not self._users[folder]:
            self._make_anew(folder, files)
            self._credentials[folder] = _digest(files)
        async with self.of_kept(folder):
            yield

    @asynccontextmanager
    async def of_kept(self, folder: Path) -> AsyncIterator[None]:
        """As `of_job`, for a process whose folder is there."""
        self._users[folder] += 1
        try:
            yield
        finally:
            self._users[folder] -= 1
            if not self._users[folder]:
                del self._users[folder], self._credentials[folder]
                if (folder / MARK).is_file():  # else a launcher on this machine has it now
                    self._removals.begin(folder)

    def finish(self) -> None:
        """Until what was removed is gone from memory. It takes seconds where it was large."""
        self._removals.finish()

    def _is_own(self, folder: Path) -> bool:
        with suppress(OSError):
            return (folder / MARK).read_bytes() == self._mark
        return False

    def _make_anew(self, folder: Path, files: Mapping[str, bytes]) -> None:
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise ValueError(f"{folder} is another user's: remove it, or take another host memory") from None
            if not (folder / MARK).is_file() and held_by(folder / LOCK) is not None:
                raise ValueError(
                    f"{folder} is of a job that this machine started: leave the machine out of cluster.machines"
                ) from None
            self._removals.begin(folder)
            folder.mkdir(mode=0o700)
        _write_private(folder / MARK, self._mark)
        for path, data in files.items():
            _write_private(folder / path, data)


def _network() -> int:
    """Names the network in which an address is this machine's: containers may share host memory."""
    return os.stat("/proc/self/ns/net").st_ino


def _write_private(path: Path, data: bytes) -> None:
    """A new file: nobody else has made it, and it is no link."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
