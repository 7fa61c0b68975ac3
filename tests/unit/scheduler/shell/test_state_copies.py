"""The copy of the state on the bus: what the store loses is made again from it, without the events that it holds."""

from __future__ import annotations

from pathlib import Path

from services.scheduler.shell.codecs.state_codec import decode_state
from services.scheduler.state.cluster_state import TERMINAL, Phase
from tests.component_bench import JOB, NODES
from tests.unit.scheduler.wire_cluster import WireCluster, running, wire_cluster
from tidegate.types import Role, instance_id
from tidegate.v1 import events_pb2

NUM_ITERATIONS = 3


async def ended(of: WireCluster) -> Phase:
    """The phase in which the job ended, once it has ended."""
    await of.changes.until(lambda: of.written_state().phase in TERMINAL)
    return of.written_state().phase


async def elected_anew(of: WireCluster) -> None:
    name = instance_id(Role.ACTOR, NODES[0])
    elected = events_pb2.LeadElected(instance=name, endpoint=f"at-{name}", epoch=2)
    await of.announcer(name, Role.ACTOR).publish(elected, incarnation=0)


async def test_each_iteration_leaves_a_copy_of_the_state_that_follows_it(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            assert await ended(of) is Phase.FINISHED
        copy = await of.bus.copies.newest(JOB)
        assert copy is not None
        state = decode_state(copy.state)
        assert (state.next_iteration, state.applied_seq) == (NUM_ITERATIONS, copy.through)


async def test_a_state_that_the_store_lost_is_made_again_from_its_copy_though_older_events_are_dropped(
    tmp_path: Path,
) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await of.changes.until(lambda: len(of.written_state().summaries) >= 1)
        last = of.written_state().applied_seq
        await of.bus.copies.drop_events(JOB, until=last)
        left = [event async for _, event in of.bus.events.read(JOB)]
        assert not any(event.HasField("job_submitted") for event in left)
        of.server.lose_data()
        async with running(await of.replica(store=of.detached_client())):
            await elected_anew(of)
            assert await ended(of) is Phase.FINISHED
        lineage = [each.iteration for each in of.written_state().summaries if not each.is_superseded]
        assert lineage == list(range(NUM_ITERATIONS))


async def test_a_state_that_does_not_fit_the_bus_is_not_copied_and_the_job_goes_on(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path, max_message_bytes=4608) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            assert await ended(of) is Phase.FINISHED
        assert await of.bus.copies.newest(JOB) is None
