"""An iteration's pictures come at its beginning, at changes and at its end, and never hold up the work."""

from __future__ import annotations

import asyncio

import pytest

from tests.component_bench import PATIENCE_S
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.runtime.pictures import DECIDING_BYTES_PER_S, WATCHING_BYTES_PER_S, Pace, Picture, Pictures, pace_of
from tidegate.v1 import events_pb2

SLOW = Pace(every_s=1e6, bytes_per_s=1.0)
"""A pace at which progress alone never leads to a picture."""


class Work:
    """An iteration whose pictures show `num_done`. The stream blocks while `may_publish` is clear."""

    def __init__(self) -> None:
        self.num_done = 0
        self.published: list[int] = []
        self.may_publish = asyncio.Event()
        self.may_publish.set()
        self.is_publishing = asyncio.Event()
        self._changed = asyncio.Event()

    async def paint(self) -> events_pb2.Training:
        return events_pb2.Training(num_minibatches_done=self.num_done)

    async def publish(self, picture: Picture) -> None:
        assert isinstance(picture, events_pb2.Training)
        self.is_publishing.set()
        await self.may_publish.wait()
        self.published.append(picture.num_minibatches_done)
        self._changed.set()

    async def until_published(self, want: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while want not in self.published:
                self._changed.clear()
                await self._changed.wait()


async def test_pictures_come_at_the_beginning_at_changes_and_at_the_end_however_slow_the_pace() -> None:
    work = Work()
    pictures = Pictures(work.paint, work.publish, SLOW)

    async with pictures.updates():
        await work.until_published(0)
        work.num_done = 1
        pictures.note_change()
        await work.until_published(1)
        work.num_done = 2

    assert work.published == [0, 1, 2]


async def test_progress_without_a_change_leads_to_pictures_at_the_pace() -> None:
    work = Work()
    async with Pictures(work.paint, work.publish, Pace(every_s=0.001, bytes_per_s=1e9)).updates():
        await work.until_published(0)
        work.num_done = 1
        await work.until_published(1)


async def test_an_unchanged_picture_is_not_published_again() -> None:
    work = Work()
    pictures = Pictures(work.paint, work.publish, SLOW)

    async with pictures.updates():
        await work.until_published(0)
        pictures.note_change()

    assert work.published == [0]


async def test_the_work_goes_on_while_a_picture_waits_and_changes_meanwhile_make_one_picture() -> None:
    work = Work()
    work.may_publish.clear()
    pictures = Pictures(work.paint, work.publish, SLOW)

    async with pictures.updates():
        await asyncio.wait_for(work.is_publishing.wait(), PATIENCE_S)
        for work.num_done in (1, 2, 3):
            pictures.note_change()
        work.may_publish.set()

    assert work.published == [0, 3]


async def test_work_that_fails_publishes_no_last_picture() -> None:
    work = Work()

    async def broken() -> None:
        async with Pictures(work.paint, work.publish, SLOW).updates():
            await work.until_published(0)
            work.num_done = 1
            raise ValueError("broke off")

    with pytest.raises(ValueError, match="broke off"):
        await broken()

    assert work.published == [0]


async def test_the_error_of_a_picture_is_raised_when_the_work_is_done() -> None:
    tried, done = asyncio.Event(), asyncio.Event()

    async def fails() -> Picture:
        tried.set()
        raise KeyError("engine")

    async def worked() -> None:
        async with Pictures(fails, Work().publish, SLOW).updates():
            await asyncio.wait_for(tried.wait(), PATIENCE_S)
            done.set()

    with pytest.raises(KeyError, match="engine"):
        await worked()
    assert done.is_set()


def test_large_pictures_come_less_often_and_still_less_where_no_policy_decides_on_them() -> None:
    large = events_pb2.Generation(group_size=1, lengths=[5000] * 4096)
    static = pace_of(SchedulerSection(decide_every_s=0.5, policy="static"))
    deciding = pace_of(SchedulerSection(decide_every_s=0.5, policy="dynarl"))

    assert static.pause_s(events_pb2.Training()) == deciding.pause_s(events_pb2.Training()) == 0.5
    assert deciding.pause_s(large) == pytest.approx(large.ByteSize() / DECIDING_BYTES_PER_S)
    assert static.pause_s(large) == pytest.approx(large.ByteSize() / WATCHING_BYTES_PER_S)
