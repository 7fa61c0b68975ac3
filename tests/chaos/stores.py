"""NATS and valkey of the driver, which a job uses by URL: real servers behind links that can fail.

A server can be killed, and come back with its data, with an older copy of it, or with none. A copy is taken while the
server is stopped for a moment, so that it is what a machine's disk would have had then.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.link import Link
from tidegate.runtime.embedded import EmbeddedServer, EmbeddedServers

NAMES = ("nats", "valkey")


@dataclass
class Stores:
    folder: Path
    servers: EmbeddedServers
    links: dict[str, Link]
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while servers are away: they come back together."""

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

    def copy(self, names: Collection[str], into: Path) -> None:
        """Copies the servers' data as it is on disk at one moment."""
        pids = [self.server(name).pid for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            for name in names:
                shutil.copytree(self.folder / name, into / name)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def lose(self, names: Collection[str], *, older: Path | None) -> None:
        """Removes the data of killed servers, or replaces it by a copy."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            if older is not None:
                shutil.copytree(older / name, self.folder / name)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Stores]:
    async with EmbeddedServers(folder) as servers:
        links = {"nats": Link(servers.nats.port), "valkey": Link(servers.store.port)}
        for link in links.values():
            await link.start()
        try:
            yield Stores(folder, servers, links)
        finally:
            for link in links.values():
                await link.stop()
