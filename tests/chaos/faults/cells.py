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

_TABLES = "{tidegate}:*"


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
        client = Redis.from_url(_url(world.root))
        try:
            key, field = await self._cell(client)
            await client.hset(key, field, bytes.fromhex(self.payload))
        except RedisError as error:
            raise NotThere(f"Redis: {error}") from error
        finally:
            await client.aclose()
        world.remedies.append(lambda: shutil.rmtree(world.root / "servers", ignore_errors=True))
        return f"{len(self.payload) // 2} bytes in {key} {field}"

    async def _cell(self, client: Redis) -> tuple[str, str]:
        found = []
        async for key in client.scan_iter(_TABLES):
            if await client.type(key) == b"hash":
                fields = await client.hkeys(key)
                found += [(_text(key), _text(field)) for field in fields]
        if not found:
            raise NotThere("the store has no cell")
        found.sort()
        return found[int(self.place * len(found))]


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _url(root: Path) -> str:
    try:
        url = str(json.loads((root / "config.json").read_text())["servers"]["redis_url"])
    except (OSError, ValueError, KeyError) as error:
        raise NotThere(f"config.json: {error}") from error
    if not url:
        raise NotThere("config.json has no URL of Redis yet: the server starts")
    return url
