"""A full disk, for one process and for a while: the kernel lets it write no file beyond a size (RLIMIT_FSIZE).

This needs no root and fills nothing. It covers a process's writes to files, on disk and in host memory, from this
moment on. It does not cover folders that cannot be made, and a write that would fail with ENOSPC fails with EFBIG.
A program that does not expect the limit's signal (SIGXFSZ) is killed by it: nats-server and valkey are, as they would
end themselves on a full disk or not, so servers are left out. Python ignores the signal.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Self

import psutil

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.processes import drawn_victims
from tests.chaos.variants import Variant
from tests.chaos.world import World


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


def _limit(processes: Iterable[psutil.Process], most_bytes: int) -> None:
    """Changes the soft limit alone, which the process's own user may raise again."""
    for process in processes:
        with suppress(psutil.Error, ProcessLookupError):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (most_bytes, hard))
