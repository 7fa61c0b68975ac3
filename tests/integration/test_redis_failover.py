"""A store with replicas and Sentinels: no write counts that a failover may lose, and a new primary is adopted anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from tests.own_servers import guarded
from tests.replicated import NUM_SERVERS, PATIENCE_S, Replicated, until
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.identity import Party
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.ports.store import Identity
from tidegate.types import LOOPBACK, GpuId, InstanceId, JobId

GPUS = tuple(GpuId(f"n0/{index}") for index in range(4))
JOB = JobId("job")


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Replicated]:
    async with Replicated(tmp_path / "servers", has_nats=False) as started:
        yield started


async def no_gates() -> GateReports:
    return {}


async def adopted(store: CellStore, term: MemoryTermRegister) -> Identity:
    """An adoption is not repeated by itself, and just after a start or a failover a replica may be late with it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(StoreUnavailable):
                return await adopt(store, term, no_gates)


async def until_unknown(write: Callable[[], Awaitable[object]]) -> None:
    """A busy machine may also give up the wait for an answer: then the text is another one."""

    async def is_told() -> bool:
        try:
            await write()
        except StoreUnavailable as unknown:
            return "0 of 1 replicas have it after 500 ms, so a failover may lose it" in str(unknown)
        raise AssertionError("a write that no replica has was taken")

    await until(is_told)


async def test_a_write_that_no_replica_has_is_unknown_also_when_it_is_repeated(servers: Replicated) -> None:
    store = redis_store(servers.redis_url)
    await adopted(store, MemoryTermRegister())
    await store.register(GPUS[:1])
    for name in ("valkey1", "valkey2"):
        servers.freeze(name)
    for _ in range(2):
        await until_unknown(lambda: store.register(GPUS))
    with pytest.raises(StoreUnavailable):
        await store.gpus()
    servers.thaw("valkey2")
    await store.register(GPUS)
    assert set(await store.gpus()) == set(GPUS)
    await store.aclose()


async def test_a_job_with_its_credential_alone_has_such_a_write_settled(tmp_path: Path) -> None:
    credentials, guard = guarded(JOB, tmp_path)
    async with Replicated(tmp_path / "servers", has_nats=False, guard=guard) as servers:
        scheduler, job = (
            redis_store(servers.redis_url, credential=credentials / party) for party in (Party.SCHEDULER, Party.JOB)
        )
        await adopted(scheduler, MemoryTermRegister())
        await job.attach()
        first = await job.next_boot(JOB, InstanceId("actor@n0"))
        for name in ("valkey1", "valkey2"):
            servers.freeze(name)
        await until_unknown(lambda: job.next_boot(JOB, InstanceId("actor@n0")))
        servers.thaw("valkey2")
        assert await job.next_boot(JOB, InstanceId("actor@n0")) > first
        for store in (scheduler, job):
            await store.aclose()


async def test_a_new_primary_is_refused_until_it_is_adopted_and_has_every_write_that_counted(
    servers: Replicated,
) -> None:
    store, term = redis_store(servers.redis_url), MemoryTermRegister()
    first = await adopted(store, term)
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
    second = await adopted(store, term)
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


class FakeSentinel:
    """Names a primary, and the failover after which it is one."""

    def __init__(self, primary: int) -> None:
        self.primary, self.epoch = primary, 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # the test is over, and asyncio would log it
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    await reader.readline()
                    words.append((await reader.readline()).strip().upper())
                writer.write(self._masters() if words == [b"SENTINEL", b"MASTERS"] else b"+OK\r\n")
        writer.close()

    def _masters(self) -> bytes:
        told = {"name": "tidegate", "ip": LOOPBACK, "port": self.primary, "flags": "master"}
        told |= {"config-epoch": self.epoch, "num-other-sentinels": 2}
        texts = [str(text) for pair in told.items() for text in pair]
        strings = [f"${len(text)}\r\n{text}\r\n" for text in texts]
        return f"*1\r\n*{len(texts)}\r\n{''.join(strings)}".encode()


async def test_a_primary_that_was_cut_off_is_left_although_its_own_sentinel_still_names_it(
    servers: Replicated,
) -> None:
    async with AsyncExitStack() as closing:
        for number in range(NUM_SERVERS):
            servers.kill(f"sentinel{number}")
        sentinels = [FakeSentinel(servers.valkey[0]) for _ in range(NUM_SERVERS)]
        for each in sentinels:
            listening = await closing.enter_async_context(await asyncio.start_server(each.answer, LOOPBACK, 0))
            each.port = listening.sockets[0].getsockname()[1]
        url = ",".join(f"{LOOPBACK}:{each.port}" for each in sentinels)
        store, term = redis_store(f"redis+sentinel://{url}/tidegate"), MemoryTermRegister()
        closing.push_async_callback(store.aclose)
        first = await adopted(store, term)
        # What a failover on the other side of a partition does. valkey0 answers as before.
        async with servers.client_of("valkey1") as primary, servers.client_of("valkey2") as replica:
            await primary.replicaof("NO", "ONE")
            await replica.replicaof(LOOPBACK, str(servers.valkey[1]))
        for each in sentinels[1:]:
            each.primary, each.epoch = servers.valkey[1], 1

        async def is_refused() -> bool:
            """Not before the replica has come over."""
            try:
                await store.register(GPUS)
            except StoreUnavailable:
                return False
            except StoreNotAdopted:
                return True
            raise AssertionError("a write that no replica has was taken")

        await until(is_refused)
        assert (await adopted(store, term)).term > first.term
        assert not await store.gpus(), "the write on the other side does not count"


async def test_sentinels_that_do_not_answer_are_named_without_the_password() -> None:
    store = redis_store("redis+sentinel://me:secret@127.0.0.1:1,127.0.0.1:2/tidegate")
    with pytest.raises(StoreUnavailable, match=r"tidegate of the Sentinels 127.0.0.1:1, 127.0.0.1:2 did not") as caught:
        await store.identity()
    assert "secret" not in str(caught.value)
    await store.aclose()
