"""A front lets other machines reach a server on loopback, and nobody without a certificate."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.looking import until
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Authority
from tidegate.certs.identity import Identity, Party
from tidegate.runtime import front as front_module
from tidegate.runtime.front import Front
from tidegate.types import LOOPBACK

NODE, USER = Identity("lab", Party.NODE, "n0"), Identity("lab", Party.OPERATOR, "me")


class Echo:
    """A server that says all that it hears, and counts its connections."""

    def __init__(self) -> None:
        self.num_reached = 0
        self.port = 0
        self.ended = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_reached += 1
        self.writers.append(writer)
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        self.ended.set()
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    found = Echo()
    server = await asyncio.start_server(found.answer, LOOPBACK, 0)
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()


@pytest.fixture
def node(tmp_path: Path) -> Path:
    Authority.create(tmp_path / "ca", "lab").issue(NODE, tmp_path / "node", addresses=[LOOPBACK])
    return tmp_path / "node"


def context_of(folder: Path, *, trusts: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusts / CA_CERT)
    context.load_cert_chain(folder / CREDENTIAL)
    return context


async def said(port: int, data: bytes, tls: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, port, ssl=tls)
    try:
        writer.write(data)
        return await reader.readexactly(len(data))
    finally:
        writer.close()


async def test_bytes_come_and_go_as_they_are(echo: Echo, node: Path) -> None:
    user = node.parent / "user"
    Authority.load(node.parent / "ca").issue(USER, user)
    data = bytes(range(256)) * 20_000
    plain = await Front.open(LOOPBACK, to_port=echo.port, credential=None)
    guarded = await Front.open(LOOPBACK, to_port=echo.port, credential=node)
    assert await said(plain.port, data, None) == data
    assert await said(guarded.port, data, context_of(user, trusts=node)) == data
    await plain.aclose()
    await guarded.aclose()


async def test_whom_tls_refuses_never_reaches_the_server_and_is_counted(
    echo: Echo, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = node.parent / "other"
    Authority.create(node.parent / "other-ca", "lab").issue(USER, other)
    front = await Front.open(LOOPBACK, to_port=echo.port, credential=node)
    bare = ssl.create_default_context(cafile=node / CA_CERT)
    monkeypatch.setattr(front_module, "_LOG_EVERY_S", 0.0)
    descriptors = len(os.listdir("/proc/self/fd"))
    with capture_logs() as lines:
        for tls in (bare, context_of(other, trusts=node), None):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await said(front.port, b"PING\r\n", tls)
        socket.create_connection((LOOPBACK, front.port)).close()
        await until(lambda: front.num_refused == 4 and len(os.listdir("/proc/self/fd")) <= descriptors)
    assert echo.num_reached == 0
    assert [(line["event"], line["peer"], line["num_refused"]) for line in lines] == [
        ("connection refused", LOOPBACK, number) for number in (1, 2, 3, 4)
    ]
    assert ["certificate" in line["reason"] for line in lines] == [True, True, False, False]
    assert all(line["reason"] for line in lines)
    await front.aclose()


async def test_a_stranger_who_tries_often_fills_no_log(echo: Echo, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_LOG_EVERY_S", 3600.0)
    front = await Front.open(LOOPBACK, to_port=echo.port, credential=node)
    with capture_logs() as lines:
        for _ in range(50):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await said(front.port, b"PING\r\n", None)
        await until(lambda: front.num_refused == 50)
    assert [line["num_refused"] for line in lines] == [1]
    await front.aclose()


async def test_who_shows_no_certificate_yet_counts_as_a_connection(
    echo: Echo, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(front_module, "_HANDSHAKE_S", 2.0)
    user = node.parent / "user"
    Authority.load(node.parent / "ca").issue(USER, user)
    front = await Front.open(LOOPBACK, to_port=echo.port, credential=node)
    _, silence = await asyncio.open_connection(LOOPBACK, front.port)
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        await said(front.port, b"one", context_of(user, trusts=node))
    await until(lambda: not front._passing)
    assert front.num_refused == 2, "one too many, and the silent one in the end"
    assert await said(front.port, b"two", context_of(user, trusts=node)) == b"two"
    silence.close()
    await front.aclose()


async def test_a_side_that_closes_closes_the_other(echo: Echo) -> None:
    front = await Front.open(LOOPBACK, to_port=echo.port, credential=None)
    await said(front.port, b"one", None)
    await asyncio.wait_for(echo.ended.wait(), 60)
    reader, writer = await asyncio.open_connection(LOOPBACK, front.port)
    writer.write(b"two")
    await reader.readexactly(3)
    echo.writers[-1].close()
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    await front.aclose()


async def test_one_connection_too_many_is_closed_and_the_others_go_on(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "MOST_CONNECTIONS", 1)
    front = await Front.open(LOOPBACK, to_port=echo.port, credential=None)
    reader, writer = await asyncio.open_connection(LOOPBACK, front.port)
    writer.write(b"one")
    await reader.readexactly(3)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await said(front.port, b"two", None)
    writer.write(b"three")
    assert await reader.readexactly(5) == b"three"
    writer.close()
    await front.aclose()


async def test_a_server_that_is_away_ends_the_connection_and_the_next_one_reaches_it(node: Path) -> None:
    reserved = await asyncio.start_server(Echo().answer, LOOPBACK, 0)
    port = reserved.sockets[0].getsockname()[1]
    reserved.close()
    await reserved.wait_closed()
    front = await Front.open(LOOPBACK, to_port=port, credential=None)
    with pytest.raises(asyncio.IncompleteReadError):
        await said(front.port, b"one", None)
    server = await asyncio.start_server(Echo().answer, LOOPBACK, port)
    assert await said(front.port, b"two", None) == b"two"
    server.close()
    await front.aclose()
