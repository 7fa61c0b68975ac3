"""In every store leases expire by its own clock, and each component has one lead at a time."""

from __future__ import annotations

import asyncio

from tests.contract.store_bench import JOB, LONG_MS, ONE, PROBE, TWO, attached, in_force, servers, store, world
from tests.contract.store_worlds import World
from tidegate.adapters.cell_store import CellStore
from tidegate.types import InstanceId, JobId, Role

__all__ = ["servers", "store", "world"]

OTHER_JOB = JobId("other")


class TestLeases:
    async def test_a_lease_expires_by_the_stores_clock_unless_it_is_renewed(
        self, world: World, store: CellStore
    ) -> None:
        await store.renew(JOB, ONE, ttl_ms=20)
        await store.renew(JOB, TWO, ttl_ms=LONG_MS)
        before = await store.now_unix_ms()
        await world.pass_ms(21)
        assert await store.now_unix_ms() >= before + 21
        assert await store.expired(JOB, longest_ms=LONG_MS) == (ONE,)
        await store.renew(JOB, ONE, ttl_ms=LONG_MS)
        assert await store.expired(JOB, longest_ms=LONG_MS) == ()

    async def test_a_released_lease_is_not_among_the_expired(self, world: World, store: CellStore) -> None:
        await store.renew(JOB, ONE, ttl_ms=1)
        await world.pass_ms(2)
        await store.release(JOB, ONE)
        await store.release(JOB, ONE)
        assert await store.expired(JOB, longest_ms=LONG_MS) == ()

    async def test_a_renewal_says_whether_the_lease_was_in_force(self, world: World, store: CellStore) -> None:
        assert not await store.renew(JOB, ONE, ttl_ms=LONG_MS), "the first time"
        assert await store.renew(JOB, ONE, ttl_ms=20)
        await world.pass_ms(25)
        assert not await store.renew(JOB, ONE, ttl_ms=LONG_MS), "it had expired"
        await store.release(JOB, ONE)
        assert not await store.renew(JOB, ONE, ttl_ms=LONG_MS), "its expiry was dealt with"
        assert await store.renew(JOB, ONE, ttl_ms=LONG_MS)

    async def test_another_jobs_instance_of_the_same_name_has_a_lease_of_its_own(
        self, world: World, store: CellStore
    ) -> None:
        await store.renew(JOB, ONE, ttl_ms=1)
        assert not await store.renew(OTHER_JOB, ONE, ttl_ms=LONG_MS), "the first time"
        await world.pass_ms(2)
        assert await store.expired(JOB, longest_ms=LONG_MS) == (ONE,)
        assert await store.expired(OTHER_JOB, longest_ms=LONG_MS) == ()
        await store.release(JOB, ONE)
        assert await store.renew(OTHER_JOB, ONE, ttl_ms=LONG_MS), "it is still in force"

    async def test_a_lease_from_before_the_clock_went_back_is_shortened(self, world: World, store: CellStore) -> None:
        await store.renew(JOB, ONE, ttl_ms=LONG_MS)
        assert await store.expired(JOB, longest_ms=20) == ()
        await world.pass_ms(21)
        assert await store.expired(JOB, longest_ms=20) == (ONE,)


class TestLeads:
    async def test_a_lead_stays_lead_while_it_renews(self, world: World, store: CellStore) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        assert (lead.instance, lead.endpoint) == (ONE, "a:1")
        refused = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert refused == lead
        await world.pass_ms(2)
        renewed = await store.renew_lead(lead, ttl_ms=LONG_MS)
        assert renewed is not None
        assert renewed.epoch == lead.epoch
        assert renewed.expires_unix_ms > lead.expires_unix_ms
        assert await in_force(store) == renewed
        assert (await in_force(store, Role.ROLLOUT)).instance == PROBE, "each component has a lead of its own"

    async def test_an_expired_lead_is_followed_under_a_new_epoch_and_cannot_renew(
        self, world: World, store: CellStore
    ) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=5)
        await world.pass_ms(6)
        follower = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert (follower.instance, follower.epoch) == (TWO, lead.epoch + 1)
        assert await store.renew_lead(lead, ttl_ms=LONG_MS) is None
        await store.resign(lead)
        assert await in_force(store) == follower

    async def test_a_lead_from_before_the_clock_went_back_is_followed_within_the_time_of_one(
        self, world: World, store: CellStore
    ) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        refused = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=20)
        assert (refused.instance, refused.epoch) == (ONE, lead.epoch)
        await world.pass_ms(21)
        follower = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert (follower.instance, follower.epoch) == (TWO, lead.epoch + 1)

    async def test_an_expired_lead_that_nobody_followed_may_renew(self, world: World, store: CellStore) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=5)
        await world.pass_ms(6)
        renewed = await store.renew_lead(lead, ttl_ms=LONG_MS)
        assert renewed == await in_force(store)

    async def test_a_restarted_instance_follows_itself_at_once_under_a_new_epoch(self, store: CellStore) -> None:
        former = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        again = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        assert again.epoch == former.epoch + 1
        assert await store.renew_lead(former, ttl_ms=LONG_MS) is None

    async def test_a_lead_that_resigned_is_followed_at_once(self, store: CellStore) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        await store.resign(lead)
        assert await store.renew_lead(lead, ttl_ms=LONG_MS) is None
        follower = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert (follower.instance, follower.epoch) == (TWO, lead.epoch + 1)

    async def test_of_many_that_campaign_at_once_all_see_the_same_lead(self, world: World, store: CellStore) -> None:
        clients = [await attached(world) for _ in range(5)]
        results = await asyncio.gather(
            *(
                client.campaign(
                    JOB, Role.ACTOR, instance=InstanceId(f"actor@{index}"), endpoint=f"{index}", ttl_ms=LONG_MS
                )
                for index, client in enumerate(clients)
            )
        )
        assert set(results) == {await in_force(store)}
