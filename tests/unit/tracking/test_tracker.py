"""The tracker offers all events of its own start, from a stream that several starts of a job share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.tracking.fake_sinks import PATIENCE_S, Written, outlet
from tests.unit.tracking.job_events import report
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.config.sections.record import TrackingSection, WandbSection, tracking_faults
from tidegate.events import EventSource
from tidegate.runtime.cancellation import end_task
from tidegate.tracking.tracker import Tracker
from tidegate.types import JobId, Role
from tidegate.v1 import events_pb2

JOB = JobId("tracked")


async def tell(bus: MemoryBus, source: EventSource, body: Any, *, incarnation: int, iteration: int = 0) -> None:
    await bus.events.publish(source.event(body, job=JOB, incarnation=incarnation, iteration=iteration))


async def test_a_tracker_offers_the_events_of_its_own_start_including_those_that_came_during_its_stop() -> None:
    bus, sink = MemoryBus(), Written()
    await bus.streams.open_job(JOB)
    # Each start of the job is an incarnation with a boot of its own.
    for boot, iterations in ((1, range(3)), (2, range(2, 4))):
        source = EventSource("actor@n0", role=Role.ACTOR, boot=boot, now_ns=lambda: 1)
        await tell(bus, source, events_pb2.JobSubmitted(), incarnation=boot)
        for iteration in iterations:
            await tell(bus, source, report(), incarnation=boot, iteration=iteration)
    of = outlet(sink)
    tracker = Tracker(bus.events, JOB, [of], boot=2)
    following = asyncio.create_task(tracker.follow())
    await asyncio.to_thread(sink.until, 2)
    await end_task(following)
    await tell(bus, source, report(), incarnation=2, iteration=4)
    await tracker.rest()
    assert of.closed(timeout_s=PATIENCE_S).written == 3
    assert sink.steps == [2, 3, 4]


@pytest.mark.parametrize(
    ("resume", "want"),
    [pytest.param(True, 0.25, id="a job that goes on"), pytest.param(False, None, id="a job that begins anew")],
)
async def test_a_resumed_job_repeats_the_evaluation_of_the_weights_that_it_continues_from(
    resume: bool, want: float | None
) -> None:
    bus, sink = MemoryBus(), Written()
    await bus.streams.open_job(JOB)
    evaluation = events_pb2.EvaluationReported(version=2, metrics={"reward_mean": 0.25})
    for boot, submitted in ((1, events_pb2.JobSubmitted()), (2, events_pb2.JobSubmitted(resume=resume))):
        source = EventSource("actor@n0", role=Role.ACTOR, boot=boot, now_ns=lambda: 1)
        await tell(bus, source, submitted, incarnation=boot)
        await tell(bus, source, evaluation if boot == 1 else report(), incarnation=boot, iteration=2)
    of = outlet(sink)
    await Tracker(bus.events, JOB, [of], boot=2).rest()
    assert of.closed(timeout_s=PATIENCE_S).written == 1
    assert [row.values.get("evaluation/reward_mean") for row in sink.rows] == [want]


@pytest.mark.parametrize(
    ("tracking", "lacks", "want"),
    [
        pytest.param(
            {"tensorboard": True}, "tensorboardX", "tracking.tensorboard needs the package tensorboardX", id="TB"
        ),
        pytest.param({"wandb": WandbSection(mode="offline")}, "wandb", "tracking.wandb.mode=offline needs", id="W&B"),
    ],
)
def test_a_requested_library_that_is_missing_is_named_with_the_remedy(
    tracking: dict[str, Any], lacks: str, want: str
) -> None:
    section = TrackingSection(**tracking)
    (fault,) = tracking_faults(section, has=lambda package: package != lacks)
    assert want in fault
    assert ", which is not installed: install what requirements/" in fault
    assert tracking_faults(section, has=lambda _: True) == []
    assert tracking_faults(TrackingSection(), has=lambda _: False) == []
