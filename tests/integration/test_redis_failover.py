"""A store with replicas and Sentinels: no write counts that a failover may lose, and a new primary is adopted anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.replicated import Replicated, until
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.redis_store import redis_store
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.types import GpuId, JobId

GPUS = tuple(GpuId(f"n0/{index}") for index in range(4))
JOB = JobId("job")


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Replicated]:
    async with Replicated(tmp_path / "servers", has_nats=False) as started:
        yield started


async def no_gates() -> GateReports:
    return {}


async def test_a_write_that_no_replica_has_is_unknown_also_when_it_is_repeated(servers: Replicated) -> None:
    store = redis_store(servers.redis_url)
    await adopt(store, MemoryTermRegister(), no_gates)
    await store.register(GPUS[:1])
    for name in ("valkey1", "valkey2"):
        servers.freeze(name)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas have it after 500 ms, so a failover may lose it"):
            await store.register(GPUS)
    with pytest.raises(StoreUnavailable):
        await store.gpus()
    servers.thaw("valkey2")
    await store.register(GPUS)
    assert set(await store.gpus()) == set(GPUS)
    await store.aclose()


async def test_a_new_primary_is_refused_until_it_is_adopted_and_has_every_write_that_counted(
    servers: Replicated,
) -> None:
    store, term = redis_store(servers.redis_url), MemoryTermRegister()
    first = await adopt(store, term, no_gates)
    await store.register(GPUS)
    await store.save(JOB, b"state", expected_write=0, version=0)
    servers.kill("valkey0")

    async def is_over() -> bool:
        return await servers.primary() != "valkey0"

    async def is_answered() -> bool:
        try:
            await store.gpus()
        except StoreUnavailable:
            return False
        return True

    await until(is_over)
    with pytest.raises(StoreNotAdopted):
        await until(is_answered)
    second = await adopt(store, term, no_gates)
    assert second.run_id != first.run_id
    assert second.term > first.term
    assert set(await store.gpus()) == set(GPUS)
    state = await store.load(JOB)
    assert state is not None
    assert state.payload == b"state"
    # The old primary comes back as a replica and takes no write as one.
    servers.start("valkey0")
    await store.save(JOB, b"later", expected_write=1, version=0)
    await store.aclose()


async def test_sentinels_that_do_not_answer_are_named_without_the_password() -> None:
    store = redis_store("redis+sentinel://me:secret@127.0.0.1:1,127.0.0.1:2/tidegate")
    with pytest.raises(StoreUnavailable, match=r"tidegate of the Sentinels 127.0.0.1:1, 127.0.0.1:2 did not") as caught:
        await store.identity()
    assert "secret" not in str(caught.value)
    await store.aclose()
