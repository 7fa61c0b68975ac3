"""How processes of one world find each other: a TCP store on a known socket, traffic on a known interface.

Invariant: no socket listens on another interface than the configured one (loopback unless told otherwise), torch's
store and gloo included.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def listening_socket(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket that listens on `host`, inheritable; on a free port, the way to know a world's port before it starts."""
    server = socket.create_server((host, port), backlog=1024)
    server.set_inheritable(True)
    return server


def serve_store(listen_fd: int, *, timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    """The store behind a listening socket, which it takes over; it lives as long as what is returned."""
    # torch binds its own store to every interface; a socket handed over by descriptor stays where it was bound.
    with socket.socket(fileno=os.dup(listen_fd)) as server:
        port = server.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def connect_store(port: int, *, timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def use_interface(interface: str) -> None:
    """Have torch's groups bind to this interface; both backends read it from the environment, for each group anew."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
