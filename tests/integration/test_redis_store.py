"""What only a real server, or a missing one, shows: forgotten scripts, no answer, keys."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.looking import until
from tidegate.adapters.cell_store import RETRY_DELAYS_S
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.redis_store import redis_store
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import StoreDamaged, StoreUnavailable
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import GpuId, InstanceId, JobId, Role

GPU = GpuId("node-a/0")


async def no_gates() -> GateReports:
    return {}


async def test_a_server_that_forgot_the_scripts_gets_them_again(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers, Redis.from_url(servers.store.url) as raw:
        store = redis_store(servers.store.url)
        await adopt(store, MemoryTermRegister(), no_gates)
        await raw.script_flush()
        await store.register((GPU,))
        assert list(await store.gpus()) == [GPU]
        await store.aclose()


async def test_all_keys_share_one_hash_tag(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers, Redis.from_url(servers.store.url) as raw:
        store = redis_store(servers.store.url)
        await adopt(store, MemoryTermRegister(), no_gates)
        job = JobId("job")
        await store.register((GPU,))
        await store.save(job, b"state", expected_write=0, version=0)
        await store.campaign(job, Role.ACTOR, instance=InstanceId("a"), endpoint="e", ttl_ms=1000)
        keys = sorted([key async for key in raw.scan_iter()])
        assert keys == [b"{tidegate}:gpus", b"{tidegate}:leads:job", b"{tidegate}:states", b"{tidegate}:store"]
        await store.aclose()


@pytest.mark.parametrize("key", ["gpus", "store"])
async def test_a_key_that_is_no_hash_is_damage_with_a_remedy_and_stays(tmp_path: Path, key: str) -> None:
    async with EmbeddedServers(tmp_path) as servers, Redis.from_url(servers.store.url) as raw:
        store = redis_store(servers.store.url)
        await adopt(store, MemoryTermRegister(), no_gates)
        await raw.delete(f"{{tidegate}}:{key}")
        await raw.set(f"{{tidegate}}:{key}", "text")
        for call in (store.gpus(), store.register((GPU,))):
            with pytest.raises(StoreDamaged, match=rf"{{tidegate}}:{key}.* is no hash: .*--resume"):
                await call
        assert await raw.get(f"{{tidegate}}:{key}") == b"text"
        await store.aclose()


async def test_a_missing_server_is_named_with_its_address_and_without_its_password() -> None:
    store = redis_store("redis://someone:secret@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable, match=r"the store at 127\.0\.0\.1:1 did not answer") as caught:
        await store.identity()
    assert "secret" not in str(caught.value)
    await store.aclose()


async def test_a_silent_server_is_given_up_in_bounded_time() -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    store = redis_store(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}/0", socket_timeout_s=0.05)
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="whether a write took effect is unknown"):
        await store.identity()
    # Each try waits for one connection and one answer, 0.6 s in all. A busy machine adds to it.
    assert time.monotonic() - started_s < 20
    # The last one may be given up before the server sees it.
    await until(lambda: len(connections) == len(RETRY_DELAYS_S) + 1)
    await store.aclose()
    silent.close()
    for connection in connections:
        connection.close()
