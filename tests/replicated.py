"""Replicated servers on this machine: three of NATS, and a primary of valkey with replicas and Sentinels."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import nats
import nats.errors
from nats.aio.client import Client
from nats.js.api import ClusterInfo
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.ports import kept_port
from tests.server_credentials import nats_options
from tests.stopping import stop
from tidegate.adapters.redis_store import redis_store
from tidegate.runtime.server_kinds import (
    MAX_PAYLOAD_BYTES,
    NATS,
    VALKEY,
    ServerGuard,
    nats_rights,
    packaged_binary,
    store_rights,
)
from tidegate.types import LOOPBACK

PATIENCE_S = 60.0
LOOK_EVERY_S = 0.05
DOWN_AFTER_MS = 2000
"""Two of a Sentinel's pings. After one alone it may take a new primary for dead that has not answered it yet."""
NUM_SERVERS = 3
PRIMARY = "tidegate"
_OWNER = "owner"
"""The user of the replicas, the Sentinels and the tests, where Redis has users."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where servers of a number run: the addresses of its NATS, and of its valkey and Sentinel. `command` begins the
    command of each."""

    nats: str = LOOPBACK
    redis: str = LOOPBACK
    command: tuple[str, ...] = ()


class Replicated:
    """`async with` runs them. A process is named by its kind and number, as in `nats1` and `valkey0`, the first
    primary."""

    def __init__(
        self,
        folder: Path,
        *,
        has_nats: bool = True,
        has_redis: bool = True,
        machines: Sequence[Machine] = (),
        disk: Callable[[Path], None] | None = None,
        guard: ServerGuard | None = None,
    ) -> None:
        """`machines`: one for each number; none: all run on loopback. `disk`: makes the folder of a server one.
        `guard`: whom the servers let in, and Redis the tests too. Sentinels let everybody in."""
        self._folder = folder
        self._machines = machines or [Machine()] * NUM_SERVERS
        self._folder.mkdir(parents=True, exist_ok=True)
        self._has_nats, self._has_redis = has_nats, has_redis
        self._disk = disk
        self._guard = guard
        self._login: dict[str, Any] = {} if guard is None else {"username": _OWNER, "password": secrets.token_hex()}
        self._kept = ExitStack()
        ports = [self._kept.enter_context(kept_port()) for _ in range(4 * NUM_SERVERS)]
        self.nats, self._routes, self.valkey, self._sentinels = (
            ports[at : at + NUM_SERVERS] for at in range(0, len(ports), NUM_SERVERS)
        )
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def nats_url(self) -> str:
        return ",".join(self.url_of_nats(number) for number in range(NUM_SERVERS))

    @property
    def redis_url(self) -> str:
        sentinels = zip(self._machines, self._sentinels, strict=True)
        return f"redis+sentinel://{','.join(f'{machine.redis}:{port}' for machine, port in sentinels)}/{PRIMARY}"

    def url_of_nats(self, number: int) -> str:
        return f"nats://{self._machines[number].nats}:{self.nats[number]}"

    def client_of(self, name: str) -> Redis:
        """A client of one valkey or Sentinel."""
        number, is_valkey = int(name[-1]), name.startswith("valkey")
        host, ports = self._machines[number].redis, self.valkey if is_valkey else self._sentinels
        return Redis(host=host, port=ports[number], decode_responses=True, **(self._login if is_valkey else {}))

    async def __aenter__(self) -> Replicated:
        try:
            if self._has_nats:
                self._configure_nats()
            if self._has_redis:
                self._configure_redis()
            for name in self._commands:
                if not name.startswith("sentinel"):
                    self.start(name)
            if self._has_nats:
                await until(self._nats_has_a_leader)
            if self._has_redis:
                # A Sentinel asks at its start who the replicas are, and then every ten seconds.
                await until(self._has_replicas)
                for number in range(NUM_SERVERS):
                    self.start(f"sentinel{number}")
                await until(self._sentinels_know_all)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._kept.close()

    def start(self, name: str) -> None:
        machine = self._machines[int(name[-1])]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*machine.command, *self._commands[name]],
                cwd=self._folder / name,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def freeze(self, name: str) -> None:
        stop(self._processes[name].pid)

    def thaw(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    async def primary(self) -> str:
        """The name of the server that the last Sentinel takes for the primary."""
        async with self.client_of(f"sentinel{NUM_SERVERS - 1}") as sentinel:
            _, port = cast(tuple[str, int], await sentinel.sentinel_get_master_addr_by_name(PRIMARY))
        return f"valkey{self.valkey.index(int(port))}"

    async def term(self) -> int:
        """That of the store on the primary, which is open."""
        store = redis_store(self.redis_url, credential=None if self._guard is None else self._guard.users[0].folder)
        try:
            found = await store.identity()
        finally:
            await store.aclose()
        assert found.is_open
        return found.term

    async def history(self, name: str) -> tuple[str, str, int]:
        """The role of a valkey, and which writes it has: the id of their stream, and how far it has that."""
        async with self.client_of(name) as client:
            seen: dict[str, Any] = await client.info("replication")
        return seen["role"], seen["master_replid"], seen["master_repl_offset"]

    async def until_replica(self, name: str) -> None:
        """Waits until a valkey has the writes of the primary, and no other ones."""

        async def is_replica() -> bool:
            role, *has = await self.history(name)
            return role == "slave" and has == [*(await self.history(await self.primary()))[1:]]

        await until(is_replica)

    async def leader_of(self, stream: str) -> str:
        """The NATS server that leads a stream."""
        return str((await self.cluster_of(stream)).leader)

    async def cluster_of(self, stream: str, *, asked: str = "") -> ClusterInfo:
        """The leader and the followers of a stream, as one NATS server says, or any."""
        urls = [self.url_of_nats(int(asked[-1]))] if asked else self.nats_url.split(",")
        client = await self._connected(urls)
        try:
            found = (await client.jetstream().stream_info(stream)).cluster
        finally:
            await client.close()
        assert found is not None
        return found

    def _configure_nats(self) -> None:
        routes = [f"nats://{each.nats}:{port}" for each, port in zip(self._machines, self._routes, strict=True)]
        for number, machine in enumerate(self._machines):
            folder = self._made(f"nats{number}")
            config: dict[str, Any] = {
                "server_name": f"nats{number}",
                "listen": f"{machine.nats}:{self.nats[number]}",
                "max_payload": MAX_PAYLOAD_BYTES,
                "jetstream": {
                    "store_dir": str(folder / "store"),
                    "sync_interval": "always",
                    "max_file_store": 1 << 40,  # else a small disk refuses a stream for what it may come to
                },
                "cluster": {"name": "test", "listen": f"{machine.nats}:{self._routes[number]}", "routes": routes},
            }
            lines = [f"{key}: {json.dumps(value)}" for key, value in config.items()]
            lines += [] if self._guard is None else [nats_rights(self._guard)]
            (folder / "nats.conf").write_text("\n".join(lines))
            self._commands[f"nats{number}"] = [str(packaged_binary(NATS)), "--config", "nats.conf"]

    def _configure_redis(self) -> None:
        binary = str(packaged_binary(VALKEY))
        login = ""
        if self._guard is not None:
            password = self._login["password"]
            users = f"{store_rights(self._guard)}user {_OWNER} on >{password} ~* &* +@all\n"
            login = f"sentinel auth-user {PRIMARY} {_OWNER}\nsentinel auth-pass {PRIMARY} {password}\n"
        for number, port in enumerate(self.valkey):
            folder = self._made(f"valkey{number}")
            options = ["--port", str(port), "--bind", self._machines[number].redis, "--protected-mode", "no"]
            options += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
            options += ["--repl-diskless-sync-delay", "0"]
            if self._guard is not None:
                (folder / "users.acl").write_text(users)
                options += ["--aclfile", "users.acl", "--primaryuser", _OWNER, "--primaryauth", password]
            if number:
                options += ["--replicaof", f"{self._machines[0].redis} {self.valkey[0]}"]
            self._commands[f"valkey{number}"] = [binary, *options]
        for number, port in enumerate(self._sentinels):
            folder = self._made(f"sentinel{number}")
            (folder / "sentinel.conf").write_text(
                f"port {port}\nbind {self._machines[number].redis}\nprotected-mode no\n"
                f"sentinel monitor {PRIMARY} {self._machines[0].redis} {self.valkey[0]} 2\n"
                f"sentinel down-after-milliseconds {PRIMARY} {DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {PRIMARY} 5000\n{login}"
            )
            self._commands[f"sentinel{number}"] = [binary, "sentinel.conf", "--sentinel"]

    def folder_of(self, name: str) -> Path:
        return self._folder / name

    def _made(self, name: str) -> Path:
        (folder := self.folder_of(name)).mkdir()
        if self._disk is not None:
            self._disk(folder)
        return folder

    async def _connected(self, urls: list[str], **options: Any) -> Client:
        """With a guard, as its first user."""
        own = None if self._guard is None else self._guard.users[0].folder
        return await nats.connect(urls, **options, **nats_options(own))

    async def _nats_has_a_leader(self) -> bool:
        with suppress(OSError, TimeoutError, nats.errors.Error):
            client = await self._connected(self.nats_url.split(","), allow_reconnect=False, error_cb=_ignored)
            try:
                await client.jetstream().account_info()
                return True
            finally:
                await client.close()
        return False

    async def _has_replicas(self) -> bool:
        with suppress(RedisError, OSError):
            async with self.client_of("valkey0") as primary:
                seen: dict[str, Any] = await primary.info("replication")
            return [seen.get(f"slave{number}", {}).get("state") for number in range(NUM_SERVERS - 1)] == ["online"] * 2
        return False

    async def _sentinels_know_all(self) -> bool:
        for number in range(NUM_SERVERS):
            with suppress(RedisError, OSError):
                async with self.client_of(f"sentinel{number}") as sentinel:
                    seen = cast(dict[str, Any], await sentinel.sentinel_master(PRIMARY))
                if seen["num-slaves"] == NUM_SERVERS - 1 and seen["num-other-sentinels"] == NUM_SERVERS - 1:
                    continue
            return False
        return True


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(LOOK_EVERY_S)


async def _ignored(_: Exception) -> None:
    """A server that is not there yet."""
