"""This process's TCP connections as the kernel has them, to end those of a group that has no way to be told.

A group's connections are those with one end at an address on which a member listens for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path


def listening() -> frozenset[str]:
    """The addresses on which this process listens."""
    return frozenset(_address(end.getsockname()) for end in _tcp_sockets() if _is_listening(end))


def shut(addresses: Collection[str]) -> None:
    """Shut the connections with an end at one of these down in both directions; descriptors stay their owner's."""
    for end in _tcp_sockets():
        # A listener that is shut reports an error for ever to the loop that polls it; a peer may be faster here.
        with suppress(OSError):
            if not _is_listening(end) and {_address(end.getsockname()), _address(end.getpeername())} & set(addresses):
                end.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    for fd in _socket_fds():
        # Its owner may be closing it at this moment.
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                yield end


def _socket_fds() -> list[int]:
    fds = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if entry.readlink().name.startswith("socket:["):
                fds.append(int(entry.name))
    return fds


def _is_listening(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: tuple[str, int]) -> str:
    return f"{name[0]} {name[1]}"
