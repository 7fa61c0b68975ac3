"""The servers for the store's contract: one in memory and a real one, each with the faults that a test can cause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from redis import Redis

from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cells
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.adapters.redis_store import Script, redis_cells
from tidegate.runtime.embedded import EmbeddedServer


class World(Protocol):
    def cells(self) -> Cells: ...

    def client(self) -> CellStore: ...

    async def pass_ms(self, duration_ms: int) -> None: ...

    async def restart(self) -> None:
        """Restart the server with its data."""
        ...

    async def lose_data(self) -> None:
        """Restart the server without its data."""
        ...

    def lose_next_answer(self) -> None:
        """Let the next write take effect, but lose its answer."""
        ...

    @property
    def num_answers_to_lose(self) -> int: ...

    async def aclose(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self._server = MemoryServer()

    def cells(self) -> Cells:
        return MemoryCells(self._server)

    def client(self) -> CellStore:
        return CellStore(self.cells())

    async def pass_ms(self, duration_ms: int) -> None:
        self._server.pass_ms(duration_ms)

    async def restart(self) -> None:
        self._server.restart()

    async def lose_data(self) -> None:
        self._server.lose_data()

    def lose_next_answer(self) -> None:
        self._server.num_answers_to_lose = 1

    @property
    def num_answers_to_lose(self) -> int:
        return self._server.num_answers_to_lose

    async def aclose(self) -> None:
        pass


class RedisWorld:
    """An empty real server behind a proxy that can lose answers."""

    def __init__(self, server: EmbeddedServer, restart: Callable[[], Awaitable[None]]) -> None:
        self._server = server
        self._restart = restart
        self._proxy = LossyProxy(server.port, lost_request=Script.load("swap").sha.encode())
        self._clients: list[CellStore] = []

    async def open(self) -> None:
        await self._proxy.open()
        with Redis(port=self._server.port) as raw:
            raw.flushall()

    def cells(self) -> Cells:
        return redis_cells(f"redis://127.0.0.1:{self._proxy.port}/0")

    def client(self) -> CellStore:
        self._clients.append(CellStore(self.cells()))
        return self._clients[-1]

    async def pass_ms(self, duration_ms: int) -> None:
        until = await self._clients[-1].now_unix_ms() + duration_ms
        while await self._clients[-1].now_unix_ms() < until:  # the server's own clock decides, so it is asked
            pass

    async def restart(self) -> None:
        await self._restart()

    async def lose_data(self) -> None:
        await self._restart()
        with Redis(port=self._server.port) as raw:
            raw.flushall()

    def lose_next_answer(self) -> None:
        self._proxy.num_answers_to_lose = 1

    @property
    def num_answers_to_lose(self) -> int:
        return self._proxy.num_answers_to_lose

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()
        await self._proxy.aclose()


class LossyProxy:
    """Forwards a port. It passes a request that contains `lost_request`, and cuts the connection at its answer."""

    def __init__(self, port: int, *, lost_request: bytes) -> None:
        self.num_answers_to_lose = 0
        self._target_port = port
        self._lost_request = lost_request
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # either side went away: so does the other
            to_server, from_server = None, None
            try:
                from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
                while request := await reader.read(1 << 20):
                    to_server.write(request)
                    answer = await from_server.read(1 << 20)
                    lose = self.num_answers_to_lose > 0 and self._lost_request in request
                    if lose or not answer:
                        self.num_answers_to_lose -= lose
                        return
                    writer.write(answer)
            finally:
                writer.close()
                if to_server is not None:
                    to_server.close()
