"""A store in memory and one on a real server, each open and with free GPUs: the bench of `tidegate.ports.store`.

A test module imports the fixtures, and names them in `__all__`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.contract.store_worlds import MemoryWorld, RedisWorld, World
from tests.ports import kept_port
from tidegate.adapters.cell_store import CellStore
from tidegate.ownership.records import Move, MoveState, Outcome, Owner, Part, PartKind, Transition
from tidegate.ports.store import LeadRecord, Store
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import GpuId, InstanceId, JobId, Layout, Role, Token, TransitionId

JOB = JobId("job")
ACTOR, ROLLOUT = Owner(JOB, Role.ACTOR), Owner(JOB, Role.ROLLOUT)
GPUS = tuple(GpuId(f"node-a/{index}") for index in range(4))
ONE, TWO = InstanceId("actor@node-a"), InstanceId("actor@node-b")
PROBE = InstanceId("actor@node-p")
UNUSED = Token(1, 0)
"""The token of a GPU before its first grant, when it was registered in term 1."""
LONG_MS = 60_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedServers]:
    async with EmbeddedServers(tmp_path_factory.mktemp("store")) as embedded:
        yield embedded


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, servers: EmbeddedServers) -> AsyncIterator[World]:
    port = servers.store.port

    async def restart() -> None:
        await servers.store.stop()
        with kept_port(port):
            await servers.start()

    world: World
    if request.param == "memory":
        world = MemoryWorld()
    else:
        world = RedisWorld(servers.store, restart)
        await world.open()
    yield world
    await world.aclose()
    assert world.num_answers_to_lose == 0, "the test meant to lose an answer and did not"


@pytest.fixture
async def store(world: World) -> CellStore:
    """A store that is open under term 1, with `GPUS` registered."""
    client = await opened(world, term=1)
    await client.register(GPUS)
    return client


async def opened(world: World, *, term: int) -> CellStore:
    client = world.client()
    await client.adopt(expected=await client.identity(), term=term, rebuilt=await client.contents())
    await client.attach()
    return client


async def attached(world: World) -> CellStore:
    client = world.client()
    await client.attach()
    return client


def start_of_actor(*gpus: GpuId, name: str = "start", tokens: Token = UNUSED) -> Transition:
    return Transition(
        id=TransitionId(name),
        job=JOB,
        incarnation=1,
        moves=tuple(Move(gpu, None, ACTOR, tokens) for gpu in gpus),
        parts=(Part(Role.ACTOR, PartKind.START, None, Layout(dp=len(gpus))),),
        planned_version=0,
        deadline_unix_ms=2_000_000,
        reason="the job starts",
    )


def handover(gpu: GpuId, token: Token, *, name: str = "handover") -> Transition:
    return replace(
        start_of_actor(gpu, name=name),
        moves=(Move(gpu, ACTOR, ROLLOUT, token),),
        parts=(
            Part(Role.ACTOR, PartKind.SUSPEND, Layout(), None),
            Part(Role.ROLLOUT, PartKind.START, None, Layout()),
        ),
    )


def stop_of_actor(gpu: GpuId, token: Token) -> Transition:
    return replace(
        start_of_actor(gpu, name="stop"),
        moves=(Move(gpu, ACTOR, None, token),),
        parts=(Part(Role.ACTOR, PartKind.STOP, Layout(), None),),
    )


async def acquire(store: Store, transition: Transition) -> Transition:
    for move in transition.moves:
        transition = await store.advance(
            transition, move.gpu, from_state=MoveState.PLANNED, to_state=MoveState.ACQUIRING
        )
    return transition


async def owned_by_actor(store: Store, *gpus: GpuId) -> None:
    started = await acquire(store, await store.plan(start_of_actor(*gpus)))
    await store.commit(started, Role.ACTOR, Layout(dp=len(gpus)))
    await store.close(started, Outcome.COMMITTED)


async def release(store: Store, transition: Transition, gpu: GpuId) -> Transition:
    await store.advance(transition, gpu, from_state=MoveState.PLANNED, to_state=MoveState.DRAINING)
    return await store.advance(transition, gpu, from_state=MoveState.DRAINING, to_state=MoveState.RELEASED)


async def in_force(store: CellStore, role: Role = Role.ACTOR) -> LeadRecord:
    """The present lead. The caller becomes lead itself if there is none."""
    return await store.campaign(JOB, role, instance=PROBE, endpoint="p:1", ttl_ms=LONG_MS)
