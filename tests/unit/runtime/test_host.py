"""An instance's life: it joins, keeps its lease, leads while its epoch lasts, reports deaths, and leaves in order."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.component_bench import JOB, NODES, snapshot
from tests.unit.runtime.diary import LEAD_TTL_MS, LEASE_TTL_MS, ROLE, WatchedStore, hosting, no_gates
from tidegate.adapters.cell_store import COUNTS_PER_TERM
from tidegate.codec import decode_grants
from tidegate.ownership.adoption import adopt
from tidegate.ports.bus import StreamFull
from tidegate.runtime.crew import WorkerGone
from tidegate.runtime.lead import CommandRefused
from tidegate.types import GpuId, Grant, Token, instance_id
from tidegate.v1 import commands_pb2, events_pb2

FIRST = COUNTS_PER_TERM + 1
"""The first epoch of the store's first term."""
HERE, ELSEWHERE = (instance_id(ROLE, node) for node in NODES)


def header(lead_epoch: int, *, term: int = 1, incarnation: int = 1) -> commands_pb2.CommandHeader:
    return commands_pb2.CommandHeader(lead_epoch=lead_epoch, term=term, incarnation=incarnation)


async def test_an_instance_joins_before_it_leads(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start(boot=3)
        (elected,) = await of.bench.published("lead_elected")
        assert elected.lead_elected == events_pb2.LeadElected(instance=HERE, endpoint="at-n0", epoch=FIRST)
        assert await of.bench.kinds() == ["instance_joined", "lead_elected"]
        (joined,) = await of.bench.published("instance_joined")
        assert joined.instance_joined == events_pb2.InstanceJoined(instance=HERE, endpoint="at-n0", boot=3)
        assert host.lead_for(header(FIRST)) is of.bench.leads[0]


async def test_an_instance_that_joins_tells_the_tokens_that_its_nodes_gates_know(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        of.gates = [Grant(GpuId("n0/0"), Token(4, 2))]
        of.start()
        (joined,) = await of.bench.published("instance_joined")
        assert decode_grants(joined.instance_joined.gates) == tuple(of.gates)


async def test_a_lead_goes_on_under_one_epoch_as_long_as_it_renews(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        await of.elected()
        for _ in range(4):
            of.server.pass_ms(LEAD_TTL_MS - 1)
            await of.next_beat()
        record = await of.lead_in_force()
        assert (record.instance, record.epoch) == (HERE, FIRST)
        assert host.lead_for(header(FIRST)) is of.bench.leads[0]
        assert len(of.bench.leads) == 1
        assert (await of.bench.kinds()).count("lead_elected") == 1


async def test_an_instance_that_does_not_lead_keeps_its_lease_too(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        other = await of.other_client()
        await other.campaign(JOB, ROLE, instance=ELSEWHERE, endpoint="at-n1", ttl_ms=10**6)
        of.start()
        await of.bench.published("instance_joined")
        of.server.pass_ms(LEASE_TTL_MS)
        await of.next_beat()
        assert await other.expired(JOB, longest_ms=60_000) == ()


async def test_while_another_leads_commands_are_refused(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        other = await of.other_client()
        await other.campaign(JOB, ROLE, instance=ELSEWHERE, endpoint="at-n1", ttl_ms=LEAD_TTL_MS)
        host = of.start()
        await of.bench.published("instance_joined")
        await of.next_beat()
        with pytest.raises(CommandRefused, match="inference@n0 does not lead inference"):
            host.lead_for(header(FIRST))
        of.server.pass_ms(LEAD_TTL_MS)
        assert await of.elected() == FIRST + 1, "the former lead is gone: its time is over"
        host.lead_for(header(FIRST + 1))


async def test_a_command_of_another_epoch_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        await of.elected()
        with pytest.raises(CommandRefused, match=f"for epoch 7, inference@n0 leads under {FIRST}"):
            host.lead_for(header(7))


async def test_a_lead_that_lost_its_epoch_stops_leading_and_may_lead_again_later(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        await of.elected()
        lead = of.bench.leads[0]
        lead.take(of.bench.open_iteration())
        await of.bench.changes.until(lambda: "begin 0" in lead.diary)
        of.server.pass_ms(LEAD_TTL_MS)
        other = await of.other_client()
        taken = await other.campaign(JOB, ROLE, instance=ELSEWHERE, endpoint="at-n1", ttl_ms=LEAD_TTL_MS)
        assert (taken.instance, taken.epoch) == (ELSEWHERE, FIRST + 1)
        await of.bench.changes.until(lambda: lead.diary[-1] == "cancel 0")
        await of.next_beat()
        with pytest.raises(CommandRefused, match="does not lead"):
            host.lead_for(header(FIRST))
        of.server.pass_ms(LEAD_TTL_MS)
        assert await of.elected(count=2) == FIRST + 2
        assert host.lead_for(header(FIRST + 2)) is of.bench.leads[1], "a lead is made anew for each epoch"


async def test_of_two_instances_one_leads_and_the_other_follows_when_it_leaves(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        of.start(NODES[0])
        first = await of.elected()
        second = of.start(NODES[1])
        await of.bench.published("instance_joined", count=2)
        await of.next_beat()
        with pytest.raises(CommandRefused):
            second.lead_for(header(first))
        record = await of.lead_in_force()
        await of.store.resign(record)
        assert await of.elected(count=2) == first + 1


async def test_an_instance_whose_lead_broke_ends_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(tmp_path) as of:
        of.start()
        await of.elected()
        lead = of.bench.leads[0]

        def breaks(error: Exception) -> None:
            raise RuntimeError("a fault of ours")

        lead.failure = WorkerGone("the worker of n0/0 died")
        monkeypatch.setattr(lead, "report_unreachable", breaks)
        lead.take(of.bench.scale_up())
        lead.take(commands_pb2.LoadWeightsRequest(header=of.bench.header(), weights=snapshot(1)))
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await of.running.pop()


async def test_an_instance_that_can_publish_no_event_ends_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        await of.elected()

        async def takes_nothing(event: events_pb2.Event) -> int:
            raise StreamFull("make room")

        monkeypatch.setattr(of.bench.bus.events, "publish", takes_nothing)
        with suppress(StreamFull):
            await host.report_death(Grant(GpuId("n0/0"), Token(1, 1)), 9, "")
        with pytest.raises(StreamFull, match="make room"):
            await of.running.pop()


async def test_an_instance_that_leaves_resigns_gives_its_lease_back_and_reports_it(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        of.start(boot=4)
        await of.elected()
        await of.stop()
        (lost,) = await of.bench.published("instance_lost")
        assert lost.instance_lost == events_pb2.InstanceLost(instance=HERE, boot=4)
        assert (await of.lead_in_force()).instance == ELSEWHERE, "nobody led any more"
        of.server.pass_ms(10 * LEASE_TTL_MS)
        assert await of.store.expired(JOB, longest_ms=60_000) == ()


async def test_the_death_of_a_worker_is_reported_once_with_its_grant_and_status(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        epoch = await of.elected()
        host.lead_for(header(epoch, incarnation=6))
        await host.report_death(Grant(GpuId("n0/3"), Token(2, 9)), -9, "no more memory")
        (failed,) = await of.bench.published("failed")
        assert failed.incarnation == 6, "of the last command that was let in"
        assert failed.failed.what == events_pb2.Failed.WHAT_WORKER
        assert [(grant.gpu, grant.token.term, grant.token.counter) for grant in failed.failed.grants] == [
            ("n0/3", 2, 9)
        ]
        assert (failed.failed.exit_status, failed.failed.fatal) == (-9, False)
        assert failed.failed.message == "worker of n0/3 ended with status -9: no more memory"
        await of.next_beat()
        assert (await of.bench.kinds()).count("failed") == 1


async def test_after_a_lost_answer_of_the_store_the_published_epoch_is_the_one_in_force(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        of.start()
        await of.bench.published("instance_joined")
        of.server.num_answers_to_lose = 3
        await of.bench.changes.until(lambda: of.server.num_answers_to_lose == 0)
        await of.next_beat()
        record = await of.lead_in_force()
        epochs = [
            event.lead_elected.epoch
            async for _, event in of.bench.bus.events.read(JOB)
            if event.HasField("lead_elected")
        ]
        assert epochs[-1] == record.epoch


async def test_a_store_that_restarted_is_joined_again_once_it_is_adopted(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        epoch = await of.elected()
        of.server.restart()
        other = WatchedStore(of.server, of.bench.changes)
        await adopt(other, of.bench.bus.term, no_gates)
        await of.next_beat()
        of.server.pass_ms(LEASE_TTL_MS)
        await of.next_beat()
        assert await other.expired(JOB, longest_ms=60_000) == ()
        host.lead_for(header(epoch, term=2))


async def test_a_store_is_joined_at_once_when_it_is_adopted(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        of.server.restart()
        of.start(beat_s=1000)
        await of.refused()
        await adopt(WatchedStore(of.server, of.bench.changes), of.bench.bus.term, no_gates)
        await of.elected()


async def test_an_instance_whose_lease_lapsed_joins_again(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start(boot=2)
        epoch = await of.elected()
        await of.store.release(JOB, HERE)
        first, again = await of.bench.published("instance_joined", count=2)
        assert again.instance_joined == first.instance_joined
        host.lead_for(header(epoch))
        await of.next_beat()
        assert (await of.bench.kinds()).count("instance_joined") == 2, "it is known again"


async def test_a_lead_that_could_not_renew_for_as_long_as_its_epoch_lasts_stops_leading(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        host = of.start()
        epoch = await of.elected()
        lead = of.bench.leads[0]
        lead.take(of.bench.open_iteration())
        await of.bench.changes.until(lambda: "begin 0" in lead.diary)
        of.store.is_away = True
        of.now_s += LEAD_TTL_MS / 1000 - 0.001
        await of.refused(count=3)
        assert lead.diary[-1] == "begin 0", "until then it leads: nobody else can"
        of.now_s += 0.001
        await of.bench.changes.until(lambda: lead.diary[-1] == "cancel 0")
        with pytest.raises(CommandRefused, match="does not lead"):
            host.lead_for(header(epoch))
        of.store.is_away = False
        assert await of.elected(count=2) == epoch + 1


async def test_a_host_survives_a_store_that_goes_away_while_it_attaches(tmp_path: Path) -> None:
    async with hosting(tmp_path) as of:
        of.start()
        await of.elected()
        of.server.restart()
        of.store.is_away_when_attached_to = True
        await of.refused(count=2)
        await adopt(WatchedStore(of.server, of.bench.changes), of.bench.bus.term, no_gates)
        of.store.is_away_when_attached_to = False
        await of.next_beat()
