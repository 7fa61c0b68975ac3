"""A full disk for a while, for one process or in one folder.

For a process: the kernel lets it write no file beyond a size (RLIMIT_FSIZE). This needs no root and fills nothing. It
covers a process's writes to files, on disk and in host memory, from this moment on. It does not cover folders that
cannot be made, and a write that would fail with ENOSPC fails with EFBIG. A program that does not expect the limit's
signal (SIGXFSZ) is killed by it, nats-server and valkey too, so servers are left out. Python ignores the signal.

In a folder: it is a file system of its own, which only root can mount, and has no room for a while. Servers are struck
too. A person who sees the disk full makes room, and restarts a server of the driver's own, since NATS takes nothing
more after that.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import psutil

from tests.chaos.disks import fill, make_room
from tests.chaos.faults.fault import Fault
from tests.chaos.faults.processes import drawn_victims
from tests.chaos.variants import Variant
from tests.chaos.world import MEMORY, NotThere, World


@dataclass(frozen=True, slots=True)
class DiskFull(Fault):
    """Writes beyond `most_bytes` of a file fail for these processes."""

    weight: ClassVar[int] = 3
    victims: tuple[str, ...]
    most_bytes: int
    seconds: float

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        victims = drawn_victims(rng, variant, with_servers=False)
        return cls(victims, rng.choice([0, 0, 4096, 65536]), round(rng.uniform(0.5, 10.0), 2))

    @property
    def may_stop(self) -> bool:
        return True

    async def inflict(self, world: World) -> str:
        struck = {victim: world.process(victim) for victim in self.victims}
        _limit(struck.values(), self.most_bytes)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            _limit(struck.values(), resource.RLIM_INFINITY)
        named = ", ".join(f"{victim} ({process.pid})" for victim, process in struck.items())
        return f"no file of {named} beyond {self.most_bytes} bytes for {self.seconds:g} s"


OF_JOB = ("{job}", "{job}/checkpoints", "{job}/attempts", "{job}/nodes", "{job}/samples", MEMORY)
OF_OWN_SERVERS = ("stores/nats", "stores/valkey")
OF_EMBEDDED_SERVERS = ("{job}/servers", "{job}/servers/nats", "{job}/servers/valkey")


@dataclass(frozen=True, slots=True)
class FolderFull(Fault):
    """A folder has no room. `folder`: in that of the run; `{job}` stands for the job's name, `MEMORY` is the job's
    host memory."""

    weight: ClassVar[int] = 3
    folder: str
    seconds: float

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        of_servers = OF_OWN_SERVERS if variant.has_own_servers else OF_EMBEDDED_SERVERS
        return cls(rng.choice(OF_JOB + of_servers), round(rng.uniform(0.5, 10.0), 2))

    @property
    def may_stop(self) -> bool:
        return True

    def own_disk(self, folder: Path, job: str) -> Path:
        return folder / self.folder.format(job=job)

    async def inflict(self, world: World) -> str:
        folder = self.own_disk(world.folder, world.name)
        if not folder.is_mount():
            raise NotThere(f"{folder} is no file system of its own: only root can mount one")
        used = fill(folder)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            make_room(folder)
        if self.folder in OF_OWN_SERVERS:
            assert world.stores is not None
            await world.stores.restart((folder.name,))
        return f"no room in {self.folder} beyond {used} bytes for {self.seconds:g} s"


def _limit(processes: Iterable[psutil.Process], most_bytes: int) -> None:
    """Changes the soft limit alone, which the process's own user may raise again."""
    for process in processes:
        with suppress(psutil.Error, ProcessLookupError):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (most_bytes, hard))
