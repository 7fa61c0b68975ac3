"""NATS and valkey of the driver, which a job uses by URL: real servers behind links that can fail.

A server can be killed, and come back with its data, with an older copy of it, or with none. A copy is taken while the
server is stopped for a moment, so that it is what a machine's disk would have had then.

valkey's clock can be set back or forth: it runs under libfaketime, which adds the seconds of a file to the time of day.
NATS makes its system calls without the C library, so its clock stays. libfaketime leaves two files for each process
that is killed; they are removed at the end. [test_chaos_stores: files_of_libfaketime]
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from tests.chaos.link import Link
from tests.stopping import stop
from tidegate.runtime.embedded import EmbeddedServer, EmbeddedServers

NAMES = ("nats", "valkey")
_FAKE_TIME = "vendor/libfaketime/src/libfaketime.so.1"


@dataclass
class Stores:
    folder: Path
    servers: EmbeddedServers
    links: dict[str, Link]
    clock: Path
    """The file with the seconds that valkey's clock is ahead."""
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while servers are away: they come back together."""
    pids: set[int] = field(default_factory=set)
    """Every process of valkey so far."""

    def __post_init__(self) -> None:
        self.pids.add(self.servers.store.pid)

    def urls(self) -> dict[str, str]:
        """The job's `servers` section."""
        nats, valkey = (f"127.0.0.1:{self.links[name].port}" for name in NAMES)
        return {"nats_url": f"nats://{nats}", "redis_url": f"redis://{valkey}"}

    def server(self, name: str) -> EmbeddedServer:
        return {"nats": self.servers.nats, "valkey": self.servers.store}[name]

    async def kill(self, names: Collection[str]) -> None:
        for name in names:
            os.kill(self.server(name).pid, signal.SIGKILL)
        for name in names:
            await self.server(name).exited()

    async def come_back(self) -> None:
        await self.servers.start()
        self.pids.add(self.servers.store.pid)

    async def restart(self, names: Collection[str]) -> None:
        async with self.alone:
            await self.kill([name for name in names if self.server(name).is_running])
            await self.come_back()

    def copy(self, names: Collection[str], into: Path) -> None:
        """Copies the servers' data as it is on disk at one moment."""
        pids = [self.server(name).pid for name in names]
        for pid in pids:
            stop(pid)
        try:
            for name in names:
                shutil.copytree(self.folder / name, into / name)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    async def set_clock(self, ahead_s: int) -> int:
        """Set valkey's clock. Returns by how many seconds it is ahead now."""
        set_ahead(self.clock, ahead_s)
        client = Redis.from_url(self.server("valkey").url)
        try:
            seconds, _ = await client.time()
        finally:
            await client.aclose()
        return round(seconds - time.time())

    def lose(self, names: Collection[str], *, older: Path | None) -> None:
        """Removes the data of killed servers, or replaces it by a copy."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            if older is not None:
                shutil.copytree(older / name, self.folder / name, dirs_exist_ok=True)


def set_ahead(clock: Path, seconds: int) -> None:
    clock.parent.mkdir(parents=True, exist_ok=True)
    partial = clock.with_suffix(".partial")
    partial.write_text(f"{seconds:+d}s\n")
    partial.rename(clock)


def remove_fake_time_files(pids: Iterable[int], *, folder: Path = Path("/dev/shm")) -> None:
    """Removes what libfaketime has left of these processes, which have ended."""
    for pid in pids:
        for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
            (folder / name).unlink(missing_ok=True)


def _under_fake_time(clock: Path) -> dict[str, str]:
    found = importlib.util.find_spec("libfaketime")
    assert found is not None, "libfaketime is not installed: make test installs it"
    assert found.origin is not None
    return {
        "LD_PRELOAD": str(Path(found.origin).parent / _FAKE_TIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        # Read the file at each call.
        "FAKETIME_NO_CACHE": "1",
        # Clocks that no one can set.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Stores]:
    clock = folder / "clock"
    set_ahead(clock, 0)
    # The files go last, once no server is left.
    with ExitStack() as closing:
        async with EmbeddedServers(folder, store_env=_under_fake_time(clock)) as servers:
            links = {"nats": Link(servers.nats.port), "valkey": Link(servers.store.port)}
            for link in links.values():
                await link.start()
            try:
                stores = Stores(folder, servers, links, clock)
                closing.callback(remove_fake_time_files, stores.pids)
                yield stores
            finally:
                for link in links.values():
                    await link.stop()
