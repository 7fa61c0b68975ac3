"""Bytes that nobody should have sent: on the subjects of the job and of the term, to its ports and sockets.

A plan records the subject itself, so that a recorded plan does not depend on the list from which it was drawn.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import nats
import nats.errors
import psutil

from tests.chaos.faults.fault import Fault
from tests.chaos.variants import Variant
from tests.chaos.world import NotThere, World
from tests.server_credentials import nats_options
from tidegate.certs.identity import Party
from tidegate.config.sections.job import ServersSection

_FOREIGN_PROMPT = 99_999
"""No iteration has it."""
_SUBJECTS = (
    "tg.events.{job}",
    "tg.figures.{job}.rollout@n0.progress.0",
    f"tg.samples.{{job}}.generated.1.0.{_FOREIGN_PROMPT}",
    f"tg.samples.{{job}}.scored.1.1.{_FOREIGN_PROMPT}",
    "tg.samples.{job}.generated.1.1.{prompt}",
    "tg.samples.{job}.scored.1.1.{prompt}",
    "tg.responses.{job}",
    "tg.unknown.{job}",
    "tg.state.{job}",
    "tg.dead.{job}",
    "$KV.TG_TERM.store",
)
_CONNECT_TIMEOUT_S = 2.0
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _drawn_bytes(rng: random.Random) -> str:
    return rng.randbytes(rng.choice([0, 1, 7, 300, 5000])).hex()


@dataclass(frozen=True, slots=True)
class OnSubject(Fault):
    """A message on one of the job's subjects or on the term's. The driver drops the dead letters that come of it."""

    weight: ClassVar[int] = 2
    subject: str
    payload: str

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        prompts = variant.training.prompts
        # A prompt of the second iteration: its group is still to come, or is there.
        prompt = prompts + rng.randrange(prompts)
        return cls(rng.choice(_SUBJECTS).replace("{prompt}", str(prompt)), _drawn_bytes(rng))

    async def inflict(self, world: World) -> str:
        subject = self.subject.format(job=world.name)
        servers = _servers(world)
        try:
            proof = nats_options(servers.nats_credential(Party.SCHEDULER))
            client = await nats.connect(servers.nats_url, allow_reconnect=False, connect_timeout=2, **proof)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise NotThere(f"NATS: {error}") from error
        try:
            await client.publish(subject, bytes.fromhex(self.payload))
            await client.flush()
        finally:
            await client.close()
        return f"published {len(self.payload) // 2} bytes on {subject}"


@dataclass(frozen=True, slots=True)
class OnPorts(Fault):
    """Bytes to every TCP port on which a process of the job listens, and to its fork servers' sockets."""

    weight: ClassVar[int] = 2
    payload: str
    is_http2: bool
    seconds: float

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        return cls(_drawn_bytes(rng), rng.random() < 0.5, round(rng.uniform(0.0, 3.0), 2))

    async def inflict(self, world: World) -> str:
        ports = sorted(set(_ports(world)))
        paths = _sockets(world)
        payload = (_HTTP2 if self.is_http2 else b"") + bytes.fromhex(self.payload)
        opened = [await _sent(("127.0.0.1", port), socket.AF_INET, payload) for port in ports]
        opened += [await _sent(str(path), socket.AF_UNIX, payload) for path in paths]
        # Some are left half-way, as by a client that hangs.
        await asyncio.sleep(self.seconds)
        for each in opened:
            if each is not None:
                each.close()
        return f"sent {len(payload)} bytes to {len(ports)} ports and {len(paths)} sockets"


async def _sent(address: Any, family: socket.AddressFamily, payload: bytes) -> socket.socket | None:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(loop.sock_connect(connection, address), _CONNECT_TIMEOUT_S)
        await asyncio.wait_for(loop.sock_sendall(connection, payload), _CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError):  # it went, or takes no bytes
        connection.close()
        return None
    return connection


def _sockets(world: World) -> list[Path]:
    return sorted(Path(_config(world)["runtime"]["host_memory_root"]).glob("*.sock"))


def _ports(world: World) -> list[int]:
    found = []
    for process in world.running().processes():
        with suppress(psutil.Error):
            connections = process.net_connections(kind="inet")
            found += [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
    return found


def _config(world: World) -> dict[str, Any]:
    """The resolved config of the run. NotThere."""
    try:
        loaded: dict[str, Any] = json.loads((world.root / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise NotThere(f"config.json: {error}") from error
    return loaded


def _servers(world: World) -> ServersSection:
    world.running()
    return ServersSection.model_validate(_config(world)["servers"])
