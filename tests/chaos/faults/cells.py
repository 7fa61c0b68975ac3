"""Garbage in a cell of the store. Nothing promises that a job goes on: it may end with a message, and a resume may be
refused until the embedded servers' data is removed. What it may not do is to end with other samples or weights."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.faults.fault import Fault
from tests.chaos.variants import Variant
from tests.chaos.world import NotThere, World
from tests.server_credentials import redis_options
from tidegate.adapters.redis_keys import table_key
from tidegate.adapters.tables import tables_of
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Party
from tidegate.config.sections.job import ServersSection
from tidegate.types import JobId


@dataclass(frozen=True, slots=True)
class InCell(Fault):
    """One field of one of the job's hashes. `place`: which of them, from 0 to 1, in order of their names."""

    needs: ClassVar[str] = "embedded"
    weight: ClassVar[int] = 2
    place: float
    payload: str

    @classmethod
    def drawn(cls, rng: random.Random, variant: Variant) -> Self:
        return cls(round(rng.random(), 4), rng.randbytes(rng.choice([0, 1, 40])).hex())

    @property
    def may_stop(self) -> bool:
        return True

    @property
    def may_refuse(self) -> bool:
        return True

    @property
    def loses_records(self) -> bool:
        return True

    async def inflict(self, world: World) -> str:
        world.running()
        servers = _servers(world.root)
        client: Redis | None = None
        try:
            client = Redis.from_url(servers.redis_url, **redis_options(servers.redis_credential(Party.SCHEDULER)))
            key, field = await self._cell(client, JobId(world.name))
            await client.hset(key, field, bytes.fromhex(self.payload))
        except (OSError, RedisError, CertsError) as error:
            raise NotThere(f"Redis: {error}") from error
        finally:
            if client is not None:
                await client.aclose()
        world.remedies.append(lambda: shutil.rmtree(world.root / "servers", ignore_errors=True))
        return f"{len(self.payload) // 2} bytes in {key} {field}"

    async def _cell(self, client: Redis, job: JobId) -> tuple[str, str]:
        found = []
        for table in (*tables_of(job), "gpus", "open", "states", "store"):
            fields = await client.hgetall(table_key(table))
            found += [(table_key(table), _text(field)) for field in fields]
        if not found:
            raise NotThere("the store has no cell")
        found.sort()
        return found[int(self.place * len(found))]


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _servers(root: Path) -> ServersSection:
    try:
        servers = ServersSection.model_validate(json.loads((root / "config.json").read_text())["servers"])
    except (OSError, ValueError, KeyError) as error:
        raise NotThere(f"config.json: {error}") from error
    if not servers.redis_url:
        raise NotThere("config.json has no URL of Redis yet: the server starts")
    return servers
