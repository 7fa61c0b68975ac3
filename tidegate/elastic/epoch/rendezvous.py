"""How the processes of one world meet: a TCP store on a known socket, and traffic on a known interface.

Invariant: no socket listens on another interface than the configured one, torch's store and gloo included. The default
is loopback. [test_trainer: no_rank_listens_beyond_loopback]
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from tidegate.types import LOOPBACK


def listening_socket(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """An inheritable socket that listens on `host`.

    With `port=0` the port is free, so the caller knows a world's port before the world starts.
    """
    server = socket.create_server((host, port), backlog=1024)
    server.set_inheritable(True)
    return server


def serve_store(listen_fd: int, *, timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    """The store behind a listening socket, which it takes over. It lives as long as the returned object."""
    # torch binds its own store to every interface; a socket passed by descriptor stays where it was bound.
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
    """Bind torch's groups to this interface. Both backends read it from the environment, for each group anew."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
