"""A server whose port many callers reach in the same moment. It is a process of its own, because it may end."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party

JOB = Identity("lab", Party.JOB, "math")
NUM_CALLERS = 8
NUM_CONNECTIONS = 400
"""Each caller makes as many. A server that gives gRPC its credential each time ends after a few hundred in all."""
PATIENCE_S = 30.0
SERVER = """
import asyncio, sys
from pathlib import Path
from tidegate.adapters.grpc_server import serve
from tidegate.adapters.grpc_tls import Credentials

async def main():
    server = await serve([], "127.0.0.1:0", tls=Credentials(Path(sys.argv[1])))
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace_s=0.0)

asyncio.run(main())
"""


def test_a_server_survives_many_connections_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    Authority.create(tmp_path / "ca", "lab").issue(JOB, folder)
    shown = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    shown.load_cert_chain(folder / "credential.pem")
    shown.set_alpn_protocols(["h2"])
    with _server(folder) as (process, port), ThreadPoolExecutor(NUM_CALLERS) as callers:
        taken = list(callers.map(_connections, [(shown, port)] * NUM_CALLERS))
        assert (process.poll(), taken) == (None, [NUM_CONNECTIONS] * NUM_CALLERS)
    assert process.returncode == 0


def test_grpc_is_given_a_credential_again_only_where_it_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, folder = Authority.create(tmp_path / "ca", "lab"), tmp_path / "job"
    authority.issue(JOB, folder)
    given = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda *args: given.append(args))
    credentials = Credentials(folder)
    for _ in range(2):
        credentials.for_server()
    (first, asks_first, _), (second, asks_second, _) = given
    assert isinstance(first, grpc.ServerCertificateConfiguration)
    assert isinstance(second, grpc.ServerCertificateConfiguration)
    assert (asks_first(), asks_first()) == (None, None)
    authority.revoke(authority.issued()[-1].serial)
    shutil.copy(tmp_path / "ca/revoked.json", folder)
    assert asks_first() is None, "TLS does not look at the list of revoked ones"
    authority.issue(JOB, folder)
    for ask in (asks_first, asks_second):
        assert isinstance(ask(), grpc.ServerCertificateConfiguration), "each port is given the renewed one"
        assert ask() is None


@contextmanager
def _server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """It ends with its input."""
    command = [sys.executable, "-c", SERVER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def _connections(reached: tuple[ssl.SSLContext, int]) -> int:
    """How many the server took, one after the other."""
    shown, port = reached
    for num_taken in range(NUM_CONNECTIONS):
        try:
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
                shown.wrap_socket(connection, server_hostname=JOB.server_name).close()
        except OSError:
            return num_taken
    return NUM_CONNECTIONS
