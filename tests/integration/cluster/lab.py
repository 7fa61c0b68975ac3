"""A cluster's listener for other machines, with credentials for those who call it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.job import JobFolder

KEEPER = Identity("lab", Party.NODE, "a")


@dataclass
class Lab:
    """The keeper's listener for jobs with folders in `jobs`."""

    authority: Authority
    folder: Path
    endpoint: str

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def job(self, name: str) -> JobFolder:
        root = self.jobs / name
        (root / "attempts" / "1" / "logs").mkdir(parents=True, exist_ok=True)
        return JobFolder(root)

    def credential(self, party: Party, name: str = "me") -> Path:
        folder = self.folder / f"{party}-{name}"
        self.authority.issue(Identity("lab", party, name), folder)
        return folder

    @asynccontextmanager
    async def channel(self, party: Party, name: str = "me") -> AsyncIterator[grpc.aio.Channel]:
        channels = Channels(default_timeout_s=30.0, tls=Credentials(self.credential(party, name)))
        try:
            yield channels.connect(self.endpoint, KEEPER)
        finally:
            await channels.close()


@asynccontextmanager
async def serving(folder: Path, services: Sequence[Service]) -> AsyncIterator[Lab]:
    authority = Authority.create(folder / "ca", "lab")
    authority.issue(KEEPER, folder / "keeper")
    (folder / "jobs").mkdir()
    server = await serve(services, "127.0.0.1:0", tls=Credentials(folder / "keeper"))
    yield Lab(authority, folder, server.endpoint)
    await server.stop(grace_s=0.0)
