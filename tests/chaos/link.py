"""A TCP proxy between a job and a server: it can be cut, go silent in one or both directions, or be slow.

TCP loses no byte of a connection that lives. So silence holds bytes back, and what was held back arrives when it ends.
A cut ends all connections, and no new one reaches the server until it ends.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

_CHUNK_BYTES = 64 * 1024


class Trouble(StrEnum):
    CUT = "cut"
    SILENT = "silent"
    SILENT_UP = "silent up"
    """The server hears nothing, and what it says arrives."""
    SILENT_DOWN = "silent down"
    SLOW = "slow"


@dataclass
class Link:
    """Listens on a free loopback port in front of the server at `target_port`."""

    target_port: int
    trouble: Trouble | None = None
    delay_s: float = 0.0
    port: int = 0
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._end_connections()
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def suffer(self, trouble: Trouble | None, *, delay_s: float = 0.0) -> None:
        """The trouble from now on. None: the link works again."""
        self.trouble, self.delay_s = trouble, delay_s
        if trouble is Trouble.CUT:
            self._end_connections()
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_connections(self) -> None:
        for writer in set(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            if self.trouble is not Trouble.CUT:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):  # the server is away, or the driver ends
            pass
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._open.add(up_writer)
        ways = [
            asyncio.ensure_future(self._pass_on(reader, up_writer, Trouble.SILENT_UP)),
            asyncio.ensure_future(self._pass_on(up_reader, writer, Trouble.SILENT_DOWN)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._open.discard(up_writer)
            up_writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: Trouble) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                while self.trouble in (Trouble.SILENT, silence):
                    await self._changed.wait()
                if self.trouble is Trouble.SLOW:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
