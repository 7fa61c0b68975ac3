"""The launcher's first events on a job's stream, and the events that it keeps in the job's folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cli.views import LinesView, UnfailingStream
from tests.unit.cli.configs import small_config
from tests.unit.cli.schedulers import LeavingScheduler, served
from tidegate.adapters.nats_bus import NatsBus
from tidegate.events import EventSource
from tidegate.job import JobFolder
from tidegate.launcher.checkpoint import FoundCheckpoint
from tidegate.launcher.event_file import EventFile, read_events
from tidegate.launcher.follow import BEAT_S, LEAST_ROOM_BYTES, JobFollower
from tidegate.launcher.outcome import End
from tidegate.ports.bus import BusLimits, BusUnavailable, StateCopy
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.runtime.service import connect_bus
from tidegate.types import JobId, Role
from tidegate.v1 import control_pb2, events_pb2, types_pb2

PATIENCE_S = 10.0
FOUND = FoundCheckpoint("inc007-it000002", incarnation=7, next_iteration=2, version=2, num_samples_trained=8)


@dataclass
class Followed:
    follower: JobFollower
    bus: NatsBus
    source: EventSource
    folder: JobFolder

    async def submitted_before(self, *, incarnation: int) -> None:
        """Puts the submission of an earlier run on the stream."""
        earlier = events_pb2.JobSubmitted(config_json="{}")
        event = self.source.event(earlier, job=JobId(self.folder.root.name), incarnation=incarnation)
        await self.bus.events.publish(event)


@asynccontextmanager
async def followed(tmp_path: Path, now_s: Callable[[], float] = time.monotonic) -> AsyncIterator[Followed]:
    """A new job on servers of its own. Its follower writes to the file `shown`."""
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = small_config(tmp_path, servers={"nats_url": servers.nats.url, "redis_url": servers.store.url})
        folder = JobFolder.of(config)
        folder.root.mkdir(parents=True)
        bus = await connect_bus(config, name="test", opens_after=0)
        try:
            with (tmp_path / "shown").open("w") as shown:
                follower = JobFollower(bus, config, folder, LinesView(UnfailingStream(shown)), now_s=now_s)
                source = EventSource("launcher", role=None, boot=1, now_ns=lambda: 1)
                yield Followed(follower, bus, source, folder)
        finally:
            await bus.close()


@pytest.mark.parametrize(
    ("earlier_incarnations", "want"),
    [([], 8), ([3], 8), ([12], 13)],
    ids=["an empty stream", "an older one", "a newer one"],
)
async def test_a_resumed_job_has_an_incarnation_above_its_streams_and_above_its_checkpoints(
    earlier_incarnations: list[int], want: int, tmp_path: Path
) -> None:
    async with followed(tmp_path) as run:
        for incarnation in earlier_incarnations:
            await run.submitted_before(incarnation=incarnation)
        await run.follower.submit(run.source, resume=True, checkpoint=FOUND)
        stream = [event async for _, event in run.bus.events.read(JobId(run.folder.root.name))]
    events = stream[len(earlier_incarnations) :]
    saved, submitted = events
    assert saved.checkpoint_saved == events_pb2.CheckpointSaved(
        name="inc007-it000002", next_iteration=2, version=2, num_samples_trained=8
    )
    assert submitted.job_submitted.resume
    assert [event.incarnation for event in events] == [want, want]


@pytest.mark.parametrize(
    ("written", "want"), [("", 1), ('{"update": "4.0.1"}\n{"upd', 5)], ids=["nothing", "a journal"]
)
async def test_a_job_whose_stores_lost_everything_has_an_incarnation_above_its_journals(
    written: str, want: int, tmp_path: Path
) -> None:
    async with followed(tmp_path) as run:
        run.folder.journal.write_text(written)
        await run.follower.submit(run.source, resume=True, checkpoint=None)
        (submitted,) = [event async for _, event in run.bus.events.read(JobId(run.folder.root.name))]
    assert submitted.incarnation == want


class TwoRunsScheduler(LeavingScheduler):
    """Reports the end of the run before this one, and then the end of this one."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder)
        self._statuses = iter((("finished", 1), ("failed", 1), ("running", 2), ("cancelled", 2)))
        self._last = ("cancelled", 2)

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        phase, applied = next(self._statuses, self._last)
        return control_pb2.GetJobResponse(job="small", phase=phase, incarnation=2, applied_sequence=applied)


class ChangingScheduler(LeavingScheduler):
    """Reports versions 5, 6 and 7 of the job, which then is cancelled."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder)
        self.asked: list[tuple[int, bool]] = []

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        self.asked.append((request.known_state_version, request.wait_s > 0))
        version = 4 + len(self.asked)
        phase = "cancelled" if version == 7 else "running"
        return control_pb2.GetJobResponse(job="small", phase=phase, applied_sequence=9, state_version=version)


async def test_a_follower_asks_for_what_is_newer_than_the_last_answer(tmp_path: Path) -> None:
    async with followed(tmp_path) as run:
        await run.follower.submit(run.source, resume=False, checkpoint=None)
        scheduler = ChangingScheduler(run.folder)
        async with served(run.folder, scheduler):
            assert await run.follower.end() is End.CANCELLED
    assert scheduler.asked == [(0, False), (0, True), (6, True)]


async def test_an_earlier_runs_end_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    async with followed(tmp_path) as run:
        await run.submitted_before(incarnation=1)
        await run.follower.submit(run.source, resume=True, checkpoint=None)
        async with served(run.folder, TwoRunsScheduler(run.folder)):
            end = await run.follower.end()
    assert end is End.CANCELLED


class WaitingScheduler(TwoRunsScheduler):
    """Reports twice that the actor has no GPUs. Then the job is cancelled."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder)
        self._statuses = iter((("starting", 1), ("starting", 1), ("starting", 1)))

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        status = await super().GetJob(request, context)
        status.components.add(role=types_pb2.ROLE_ACTOR, state="down")
        status.last_reason = "0 of 1 GPUs of the actor are free"
        return status


async def test_the_output_of_a_run_says_why_its_job_has_no_gpus(tmp_path: Path) -> None:
    clock = count(step=20)
    async with followed(tmp_path, now_s=lambda: float(next(clock))) as run:
        await run.follower.submit(run.source, resume=False, checkpoint=None)
        async with served(run.folder, WaitingScheduler(run.folder)):
            await run.follower.end()
    assert "no GPUs for actor since 20 s: 0 of 1 GPUs of the actor are free" in (tmp_path / "shown").read_text()


class LosingEvents:
    """Answers the first question when it is cancelled: `asyncio.wait_for` of Python 3.11 loses such a cancellation."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.events = self

    async def free_bytes(self, job: JobId) -> int:
        is_first = not self.asked.is_set()
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not is_first:
                raise
        return 2 * LEAST_ROOM_BYTES


class SilentEvents:
    """A bus that gives no answer."""

    def __init__(self) -> None:
        self.events = self

    async def free_bytes(self, job: JobId) -> int:
        raise BusUnavailable("no answer")


async def test_a_server_of_ours_that_gives_no_answer_for_too_long_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    bus: Any = SilentEvents()
    config, seconds = small_config(tmp_path), iter([0.0, 59.0, 61.0])
    with (tmp_path / "shown").open("w") as shown:
        view = LinesView(UnfailingStream(shown))
        follower = JobFollower(
            bus, config, JobFolder.of(config), view, now_s=lambda: next(seconds), gives_up_after_s=60
        )
        said = await asyncio.wait_for(follower.until_unusable(), PATIENCE_S)
    assert "told nothing of the stream of events for 61 s" in said
    assert "make room in" in said


async def test_a_look_at_the_streams_room_ends_with_the_job_where_its_answer_loses_the_cancellation(
    tmp_path: Path,
) -> None:
    bus: Any = LosingEvents()
    config = small_config(tmp_path)
    with (tmp_path / "shown").open("w") as shown:
        follower = JobFollower(bus, config, JobFolder.of(config), LinesView(UnfailingStream(shown)))
        looking = asyncio.create_task(follower.until_unusable())
        await bus.asked.wait()
        looking.cancel()
        await asyncio.wait([looking], timeout=PATIENCE_S)
    assert looking.cancelled()


async def test_only_an_event_that_the_file_has_is_dropped_from_the_stream(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = small_config(tmp_path, servers={"nats_url": servers.nats.url, "redis_url": servers.store.url})
        folder, job = JobFolder.of(config), JobId(config.job)
        folder.root.mkdir(parents=True)
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=BusLimits(kept_events=100))
        try:
            await bus.streams.open_job(job)
            source = EventSource("rollout@n0", role=Role.ROLLOUT, boot=1, now_ns=lambda: 1)
            for _ in range(600):
                await bus.events.publish(source.event(events_pb2.Failed(), job=job, incarnation=1))
            await bus.copies.keep(job, StateCopy(through=400, state=b"state"))
            with (tmp_path / "shown").open("w") as shown:
                follower = JobFollower(bus, config, folder, LinesView(UnfailingStream(shown)))
                following = asyncio.create_task(follower.end())
                while len(left := [at async for at, _ in bus.events.read(job)]) == 600 or left[0] <= 400:
                    assert sequences(folder)[-1:] >= [at - 1 for at in left[:1]], "dropped before it was written"
                    await asyncio.sleep(BEAT_S / 10)
                await end_task(following)
                await JobFollower(bus, config, folder, LinesView(UnfailingStream(shown))).write_last_events()
        finally:
            await bus.close()
    assert left == list(range(401, 601))
    assert sequences(folder) == list(range(1, 601))


def sequences(folder: JobFolder) -> list[int]:
    return [row.stream_sequence for row in read_events(folder.events)]


@pytest.mark.parametrize(
    ("left", "want"),
    [
        pytest.param("as it was", [1, 2, 3, 4], id="goes on where it ended"),
        pytest.param("cut off", [1, 2, 3, 4], id="loses the line that a kill cut off, and gets it again"),
        pytest.param("of another stream", [7], id="takes nothing of a stream that lacks its last event"),
    ],
)
async def test_the_file_of_events_continues_where_it_ended(left: str, want: list[int], tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = small_config(tmp_path, servers={"nats_url": servers.nats.url, "redis_url": servers.store.url})
        folder = JobFolder.of(config)
        folder.root.mkdir(parents=True)
        bus = await connect_bus(config, name="test", opens_after=0)
        try:
            for boot in (1, 2):
                source = EventSource("launcher", role=None, boot=boot, now_ns=lambda: 1)
                with (tmp_path / "shown").open("w") as shown:
                    follower = JobFollower(bus, config, folder, LinesView(UnfailingStream(shown)))
                    await follower.submit(source, resume=boot == 2, checkpoint=None)
                    failed = events_pb2.Failed(message=f"of boot {boot}")
                    await bus.events.publish(source.event(failed, job=JobId(config.job), incarnation=1))
                    await follower.write_last_events()
                    await follower.write_last_events()
                if boot == 1:
                    leave(folder, left)
        finally:
            await bus.close()
    assert sequences(folder) == want


def leave(folder: JobFolder, left: str) -> None:
    """Leaves the file in the state that a later start finds."""
    match left:
        case "cut off":
            folder.events.write_bytes(folder.events.read_bytes()[:-10])
        case "of another stream":
            folder.events.unlink()
            EventFile(folder.events).append(7, events_pb2.Event(id="launcher/0/1"))
