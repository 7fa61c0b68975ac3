"""Who gets the ranks next: a request, a change, or the one for whom they are reserved."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.actor.all_ranks import AllRanks
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import Crew, WorkerGone
from tidegate.types import Layout


@dataclass
class Members:
    """The crew, as far as the ranks look at it: its members. A death takes one out."""

    members: list[str] = field(default_factory=lambda: ["n0/0", "n0/1"])

    async def forget_dead(self) -> None:
        """They are forgotten at once."""


def two_ranks() -> tuple[AllRanks, Members]:
    crew = Members()
    ranks = AllRanks(cast(Crew, crew))
    ranks.switch(Layout(dp=2))
    return ranks, crew


async def settled() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Course:
    """What was done, in order."""

    def __init__(self, ranks: AllRanks) -> None:
        self.done: list[str] = []
        self._ranks = ranks

    async def request(self, name: str, *, reserves: bool = False) -> None:
        async def ask() -> None:
            self.done.append(name)

        await self._ranks.do(name, ask, reserves=reserves)

    async def change(self) -> None:
        async with self._ranks.alone():
            self.done.append("change")

    async def queued(self) -> tuple[asyncio.Task[Any], asyncio.Task[None], asyncio.Task[None]]:
        """A request, and behind it a change and another request, in this order. The first ends when this returns."""
        ends = asyncio.Event()
        first = asyncio.create_task(self._ranks.do("first", ends.wait))
        await settled()
        change = asyncio.create_task(self.change())
        await settled()
        second = asyncio.create_task(self.request("second"))
        await settled()
        ends.set()
        return first, change, second


async def test_reserved_ranks_wait_for_the_next_request_of_the_same() -> None:
    ranks, _ = two_ranks()
    course = Course(ranks)
    await course.request("portion", reserves=True)
    change = asyncio.create_task(course.change())
    await settled()
    await course.request("update")
    await change
    assert course.done == ["portion", "update", "change"]


@pytest.mark.parametrize("interrupts", [False, True])
async def test_a_change_that_carries_comes_before_the_request_for_which_the_ranks_are_reserved(
    interrupts: bool,
) -> None:
    ranks, _ = two_ranks()
    course = Course(ranks)
    await course.request("portion", reserves=True)

    async def carry() -> None:
        async with ranks.alone(carries=True) as change:
            assert ranks.are_carrying
            await settled()
            course.done.append("change")
            change.interrupts = interrupts

    change = asyncio.create_task(carry())
    other = asyncio.create_task(course.change())
    await settled()
    await course.request("update")
    await asyncio.gather(change, other)
    # What was not carried is lost, and with it the reservation.
    assert course.done == ["portion", "change", *(["change", "update"] if interrupts else ["update", "change"])]
    assert ranks.num_interruptions == 1 + interrupts
    assert not ranks.are_carrying


async def test_a_change_gets_the_ranks_when_their_reservation_ends() -> None:
    ranks, _ = two_ranks()
    course = Course(ranks)
    await course.request("portion", reserves=True)
    change = asyncio.create_task(course.change())
    await settled()
    assert course.done == ["portion"]
    ranks.end_reservation()
    await change
    assert ranks.num_interruptions == 1


async def test_a_change_that_waits_comes_before_the_next_request() -> None:
    ranks, _ = two_ranks()
    course = Course(ranks)
    first, change, second = await course.queued()
    await asyncio.gather(first, change, second)
    assert course.done == ["change", "second"]


async def test_a_death_ends_the_reservation_so_that_a_change_can_bring_the_rank_back() -> None:
    ranks, crew = two_ranks()
    course = Course(ranks)
    await course.request("portion", reserves=True)
    change = asyncio.create_task(course.change())
    await settled()
    crew.members.pop()
    update = asyncio.create_task(course.request("update"))
    await change
    crew.members.append("n0/2")
    ranks.switch(Layout(dp=2))
    await update
    assert course.done == ["portion", "change", "update"]


async def test_a_request_that_breaks_off_reserves_nothing() -> None:
    ranks, _ = two_ranks()

    async def ask() -> Any:
        raise WorkerGone("a peer died, and all are here again")

    with pytest.raises(WorkerGone):
        await ranks.do("portion", ask, reserves=True)
    async with asyncio.timeout(60), ranks.alone():
        assert ranks.num_interruptions == 1


async def test_a_change_that_is_given_up_leaves_the_ranks_to_requests() -> None:
    ranks, _ = two_ranks()
    course = Course(ranks)
    first, change, second = await course.queued()
    await end_task(change)
    await asyncio.gather(first, second)
    assert course.done == ["second"]
