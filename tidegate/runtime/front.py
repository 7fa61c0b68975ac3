"""A way from other machines to a server that listens on loopback alone.

A front listens on an address of this machine and passes on what comes. With a credential it speaks TLS there and lets
in only who has a certificate of the same authority: for a server that has no TLS. Without one it passes bytes as they
are: for a server that asks for a certificate itself.

Invariants:
- Nobody without a certificate of the authority reaches a server behind a front with a credential.
  [test_front: nobody_without_a_certificate]
- Where one side closes, so does the other. [test_front: closes_the_other]
- It holds `MOST_CONNECTIONS` at most. [test_front: one_connection_too_many]
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidegate.certs.authority import CA_CERT, CREDENTIAL
from tidegate.types import LOOPBACK

MOST_CONNECTIONS = 4096
"""A job has two for each of its processes, and one to a few for each of its services."""
_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 10.0
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}
"""A machine that is gone says nothing. Its connections end after a minute, also with data on the way."""


class Front:
    """`port`: chosen at `open`, on which it listens until `aclose`."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    async def open(cls, address: str, *, to_port: int, credential: Path | None, listener: int | None = None) -> Front:
        """To the server at `to_port` of loopback. `listener`: the descriptor of a front that this process had under its
        earlier program. OSError where it cannot listen there."""
        found = cls(to_port)
        tls: dict[str, Any] = (
            {} if credential is None else {"ssl": _tls_of(credential), "ssl_handshake_timeout": _HANDSHAKE_S}
        )
        where: dict[str, Any] = {"host": address, "port": 0}
        if listener is not None:
            where = {"sock": socket.socket(fileno=listener)}
        found._server = await asyncio.start_server(found._serve, **where, **tls)
        found.port = found._server.sockets[0].getsockname()[1]
        return found

    @property
    def listener(self) -> int:
        """The descriptor of its listening socket."""
        assert self._server is not None, "it is open"
        return self._server.sockets[0].fileno()

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._passing) >= MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None, "asyncio calls it in a task"
        self._passing.add(task)
        _keep_alive(writer.get_extra_info("socket"))
        try:
            # A server that is started again is away for a moment: its clients try again.
            with suppress(OSError):
                near, far = await asyncio.open_connection(LOOPBACK, self._to_port)
                try:
                    await _first_of(_passed(reader, far), _passed(near, writer))
                finally:
                    far.close()
        finally:
            self._passing.discard(task)
            writer.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one of the two is closed."""
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _tls_of(credential: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(credential / CREDENTIAL)
    context.load_verify_locations(credential / CA_CERT)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
