"""Closes the TCP connections of a process group that has no call to abort. It finds them among the process's sockets.

A group's connections are those with one end at an address on which a member listens for the group.
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
    """Shut down, in both directions, the connections with an end at one of these addresses.

    The descriptors stay open: their owner closes them.
    """
    for end in _tcp_sockets():
        # Spare listeners: a listener that is shut reports an error for ever to the loop that polls it.
        # A peer may have shut the connection first, hence the suppressed error.
        with suppress(OSError):
            if not _is_listening(end) and {_address(end.getsockname()), _address(end.getpeername())} & set(addresses):
                end.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    for fd in _socket_fds():
        # The owner may close the descriptor at this moment.
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
