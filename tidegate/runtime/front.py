"""A way from other machines to a server that listens on loopback alone.

A front listens on an address of this machine and passes on what comes. With a credential it speaks TLS there and lets
in only who has a certificate of the same authority: for a server that has no TLS. Without one it passes bytes as they
are: for a server that asks for a certificate itself.

Invariants:
- Nobody without a certificate of the authority reaches a server behind a front with a credential.
  [test_front: never_reaches_the_server_and_is_counted]
- Whom it refuses is counted, and logged once a second at most. [test_front: fills_no_log]
- Where one side closes, so does the other. [test_front: closes_the_other]
- It holds `MOST_CONNECTIONS` at most. [test_front: one_connection_too_many]
- One that shows no certificate yet is among them. [test_front: no_certificate_yet_counts]
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from tidegate.certs.authority import CA_CERT, CREDENTIAL
from tidegate.types import LOOPBACK

MOST_CONNECTIONS = 4096
"""A job has two for each of its processes, and one to a few for each of its services."""
_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 10.0
_LOG_EVERY_S = 1.0
"""Strangers may try as often as they like, and the log is on a disk."""
_AFTER_FAILED_ACCEPT_S = 1.0
"""No event tells that a descriptor or memory is free again."""
_BACKLOG = 100
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}
"""A machine that is gone says nothing. Its connections end after a minute, also with data on the way."""


class Front:
    """`port`: on which it listens from `open` until `aclose`. `num_refused`: the connections that it refused."""

    def __init__(self, listening: socket.socket, to_port: int, tls: ssl.SSLContext | None) -> None:
        self._listening, self._to_port, self._tls = listening, to_port, tls
        self._passing: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())
        self._logged_s = float("-inf")
        self._log = structlog.get_logger("tidegate.front")
        self.port: int = listening.getsockname()[1]
        self.num_refused = 0

    @classmethod
    async def open(cls, address: str, *, to_port: int, credential: Path | None, listener: int | None = None) -> Front:
        """To the server at `to_port` of loopback. `listener`: the descriptor of a front that this process had under its
        earlier program. OSError where it cannot listen there."""
        tls = None if credential is None else _tls_of(credential)
        if listener is None:
            listening = socket.create_server((address, 0), backlog=_BACKLOG)
        else:
            listening = socket.socket(fileno=listener)
        listening.setblocking(False)
        return cls(listening, to_port, tls)

    @property
    def listener(self) -> int:
        """The descriptor of its listening socket."""
        return self._listening.fileno()

    async def aclose(self) -> None:
        tasks = {self._accepting, *self._passing}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (peer, *_) = await loop.sock_accept(self._listening)
            except ConnectionAbortedError:  # by the other side
                continue
            except (OSError, MemoryError) as failure:  # the machine has no descriptor or no memory left
                self._log.warning("no connection accepted", reason=str(failure))
                await asyncio.sleep(_AFTER_FAILED_ACCEPT_S)
                continue
            if len(self._passing) >= MOST_CONNECTIONS:
                connection.close()
                self._refuse(peer, f"{MOST_CONNECTIONS} connections are open")
            else:
                task = asyncio.create_task(self._serve(connection, peer))
                self._passing.add(task)
                task.add_done_callback(self._passing.discard)
            # Where many wait, an accept would never give the others their turn.
            await asyncio.sleep(0)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        within: dict[str, Any] = {} if self._tls is None else {"ssl_handshake_timeout": _HANDSHAKE_S}
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls, **within)
        except OSError as failure:  # ssl.SSLError is one
            self._refuse(peer, str(failure) or type(failure).__name__)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            _keep_alive(transport.get_extra_info("socket"))
            # A server that is started again is away for a moment: its clients try again.
            with suppress(OSError):
                near, far = await asyncio.open_connection(LOOPBACK, self._to_port)
                try:
                    await _first_of(_passed(reader, far), _passed(near, writer))
                finally:
                    far.close()
        finally:
            writer.close()

    def _refuse(self, peer: str, reason: str) -> None:
        self.num_refused += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            self._log.warning(
                "connection refused", peer=peer, port=self.port, reason=reason, num_refused=self.num_refused
            )


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
