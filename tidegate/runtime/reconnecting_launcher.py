"""A launcher that connects again after its node's fork server was restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tidegate.runtime.fork_client import ForkServerLauncher
from tidegate.runtime.launch import LauncherGone, WorkerFds, WorkerProcess, WorkerSpec


class ReconnectingLauncher:
    """Connects at the first launch, and again at the first launch after it lost the server."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        """`timeout_s`: how long a server may take until it listens."""
        self._path = path
        self._timeout_s = timeout_s
        self._launcher: ForkServerLauncher | None = None
        self._connecting = asyncio.Lock()

    async def launch(self, spec: WorkerSpec, fds: WorkerFds) -> WorkerProcess:
        try:
            return await (await self._connect()).launch(spec, fds)
        except LauncherGone:
            self._launcher = None
            return await (await self._connect()).launch(spec, fds)

    async def close(self) -> None:
        if self._launcher is not None:
            await self._launcher.close()

    async def _connect(self) -> ForkServerLauncher:
        async with self._connecting:
            if self._launcher is None:
                self._launcher = await ForkServerLauncher.connect(self._path, timeout_s=self._timeout_s)
            return self._launcher
