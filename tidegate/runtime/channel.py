"""Frames between a service and its worker over a socket pair: `WorkerCall` one way, `WorkerReply` the other.

A frame is a 4-byte big-endian length and that many bytes of protobuf. The socket carries nothing else. The worker's
side blocks, with a timeout; the service's side is asyncio. The writer refuses a frame longer than `MAX_FRAME_BYTES`. A
reader that meets one closes the channel.

Invariant: frames come out whole, in order, and once. [test_channel: come_out_whole_and_in_order]
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A minibatch of 512 responses of 16k tokens with three floats each is about 130 MB. A worker's memory has it twice."""
_LENGTH = struct.Struct("!I")
_READ_BYTES = 1024 * 1024

Incoming = TypeVar("Incoming", bound=Message)


class ChannelClosed(ConnectionError):
    """The other side is gone, or sent bytes that are not a frame."""


class FrameTooLarge(ValueError):
    """The message is longer than a frame may be. Nothing was sent."""


def frame(message: Message) -> bytes:
    """The bytes of the message on the socket. FrameTooLarge."""
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}: "
            "send fewer samples in one call"
        )
    return _LENGTH.pack(len(body)) + body


def _checked_length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ChannelClosed(f"the other side announced a frame of {length} bytes, over the limit of {MAX_FRAME_BYTES}")
    return int(length)


def _decoded(kind: type[Incoming], body: bytes) -> Incoming:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ChannelClosed(f"{len(body)} bytes from the other side are not a {kind.__name__}: {error}") from error


class BlockingChannel(Generic[Incoming]):
    """The worker's end: one thread reads and writes."""

    def __init__(self, sock: socket.socket, incoming: type[Incoming]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._incoming = incoming
        self._unread = bytearray()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, message: Message) -> None:
        """ChannelClosed, or FrameTooLarge with nothing sent."""
        data = frame(message)
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(f"the other side of the channel is gone: {error}") from error

    def receive(self, timeout_s: float | None) -> Incoming | None:
        """The next message. None when no whole one came within `timeout_s` (None waits for ever, 0 only looks)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._take()) is None:
            rest_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._readable.poll(None if rest_s is None else rest_s * 1000):
                return None
            self._read()
        return message

    def _take(self) -> Incoming | None:
        if len(self._unread) < _LENGTH.size:
            return None
        end = _LENGTH.size + _checked_length(bytes(self._unread[: _LENGTH.size]))
        if len(self._unread) < end:
            return None
        body = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        return _decoded(self._incoming, body)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelClosed(f"the other side of the channel is gone: {error}") from error
        if not data:
            raise ChannelClosed("the other side closed the channel")
        self._unread += data


class AsyncChannel(Generic[Incoming]):
    """The service's end: one task reads, any number of tasks write."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: type[Incoming]) -> None:
        self._reader = reader
        self._writer = writer
        self._incoming = incoming

    @classmethod
    async def open(cls, sock: socket.socket, incoming: type[Incoming]) -> AsyncChannel[Incoming]:
        """Takes over the socket."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, incoming)

    async def send(self, message: Message) -> None:
        """ChannelClosed, or FrameTooLarge with nothing sent."""
        data = frame(message)
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed(f"the other side of the channel is gone: {error}") from error

    async def receive(self) -> Incoming:
        """The next message. ChannelClosed."""
        try:
            length = _checked_length(await self._reader.readexactly(_LENGTH.size))
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed(f"the other side closed the channel: {error}") from error
        return _decoded(self._incoming, body)

    def close(self) -> None:
        """Closes at once and drops the bytes that the other side has not taken yet."""
        self._writer.transport.abort()
