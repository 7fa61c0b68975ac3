"""Keeps a port for a server that a test starts later, or again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tidegate.types import LOOPBACK


@contextmanager
def kept_port(port: int = 0, *, host: str = LOOPBACK) -> Iterator[int]:
    """Within it nobody is given the port by chance. Who asks for it by number, and with SO_REUSEADDR as servers do, may
    listen there. Without a number it is a free one."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        yield int(holder.getsockname()[1])
