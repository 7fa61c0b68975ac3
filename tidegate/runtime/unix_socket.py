"""Unix sockets at paths of any length. The kernel takes 107 bytes, so the name is reached through its folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def bound_listener(path: Path) -> socket.socket:
    """A listening packet socket at `path`, for this user only. It replaces any file at `path`."""
    listener = _packet_socket()
    path.unlink(missing_ok=True)
    umask = os.umask(0o177)
    try:
        with _short(path) as address:
            listener.bind(address)
    finally:
        os.umask(umask)
    listener.listen(64)
    return listener


def connect_to(path: Path) -> socket.socket:
    """FileNotFoundError or ConnectionRefusedError where no process listens."""
    sock = _packet_socket()
    try:
        with _short(path) as address:
            sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _packet_socket() -> socket.socket:
    """Makes a socket of packets, which keep each request together with its descriptors."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
