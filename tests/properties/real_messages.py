"""Real messages, states and configs for fuzzed decoders: each is made by the code that writes it in a job."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

from services.scheduler.shell.codecs.state_codec import encode_state
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from tests.component_bench import JOB as WIRE_JOB
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tests.unit.scheduler.shell.wire_pictures import PICTURES
from tests.unit.scheduler.wire_cluster import running, wire_cluster
from tests.watched_samples import ended_response, generated_group, scored_group
from tidegate.codec import encode_grants, encode_layout, encode_role
from tidegate.events import EventBody, EventSource
from tidegate.types import Grant, Layout, NodeId, Role, Token, instance_id
from tidegate.v1 import events_pb2, types_pb2

TOKEN = Token(1, 2)
STANDBY = gpu("n0", 3)
NUM_STATES = 30


@dataclass(frozen=True, slots=True)
class LivedJob:
    """A job that a real scheduler ran to its end, on the bus and the store in memory."""

    events: tuple[bytes, ...]
    states: tuple[ClusterState, ...]


@cache
def lived_job() -> LivedJob:
    with redirect_stdout(StringIO()):
        return asyncio.run(_lived_job())


async def _lived_job() -> LivedJob:
    states: list[ClusterState] = []
    with tempfile.TemporaryDirectory() as folder:
        async with wire_cluster(Path(folder)) as of:

            def has_ended() -> bool:
                states.append(of.written_state())
                return states[-1].phase in TERMINAL

            await of.boot()
            await of.submit()
            async with running(await of.replica()):
                await of.changes.until(has_ended)
            events = [event.SerializeToString() async for _, event in of.bus.events.read(WIRE_JOB)]
    return LivedJob(tuple(events), tuple(states))


def said(body: EventBody, *, source: str = "actor@n0", role: Role | None = Role.ACTOR, sequence: int = 1000) -> bytes:
    """An event of the present incarnation of the fake cluster's job."""
    events = EventSource(source, role=role, boot=1, now_ns=lambda: 0)
    event = events.event(body, job=JOB, incarnation=1)
    event.sequence, event.id = sequence, f"{source}/1/{sequence}"
    return event.SerializeToString()


def other_events() -> tuple[bytes, ...]:
    """Events that `lived_job` has not: pictures, deaths, and what a person asks for."""
    grants = encode_grants([Grant(gpu("n0", 0), TOKEN)])
    places = [
        types_pb2.RolePlace(role=encode_role(role), layout=encode_layout(placed.layout), gpus=placed.gpus)
        for role, placed in spec().placement.items()
    ]
    bodies: list[EventBody] = [
        *(message for message, _ in PICTURES.values()),
        events_pb2.Failed(what=events_pb2.Failed.WHAT_WORKER, grants=grants, exit_status=-9, message="killed"),
        events_pb2.InstanceLost(instance=instance_id(Role.ACTOR, NodeId("n0")), boot=1),
        events_pb2.GateReported(node="n0", gpus=[events_pb2.GateState(gpu="n0/0", highest_token=grants[0].token)]),
        events_pb2.ResizeRequested(layout=encode_layout(Layout(dp=2)), gpus=[gpu("n0", 0), STANDBY]),
        events_pb2.ResizeFailed(message="a rank died"),
        events_pb2.SplitRequested(places=places),
        events_pb2.DrainRequested(gpus=[STANDBY]),
        events_pb2.DeadLettered(subject="tg.samples", reason="odd", dead_letter=3),
        events_pb2.JobResumeRequested(),
        events_pb2.JobCancelRequested(reason="enough"),
        events_pb2.CheckpointSaved(next_iteration=1, version=1, name="inc001-it000001", num_samples_trained=8),
        events_pb2.EvaluationReported(version=1, num_prompts=4, samples_per_prompt=2, metrics={"reward_mean": 0.5}),
        events_pb2.Progress(num_done=1, num_total=4, phase="train", metrics={"loss": 0.1}),
        events_pb2.Backlog(queue="generated", num_messages=3),
    ]
    return tuple(said(body) for body in bodies)


def groups() -> tuple[bytes, ...]:
    made = (generated_group(3), scored_group(4), ended_response(5, 1))
    return tuple(group.SerializeToString() for group in made)


@cache
def states() -> tuple[ClusterState, ...]:
    """States of `lived_job`, and of a fake cluster's job with deaths and pictures, some steps apart."""
    drive = booted(FakeCluster(spec(num_iterations=2, standby=(STANDBY,), evaluate_every=1)))
    seen = [drive.state]
    for number in range(400):
        _disturb(drive, number)
        if not drive.step():
            break
        if drive.state != seen[-1]:
            seen.append(drive.state)
    lived = lived_job().states
    return (*_some(seen), *_some(lived))


def _some(states: Sequence[ClusterState]) -> Sequence[ClusterState]:
    return states[:: max(1, len(states) // NUM_STATES)]


def _disturb(drive: Drive, number: int) -> None:
    match number:
        case 30:
            drive.cluster.kill_worker(gpu("n1", 2))
        case 45 | 60 | 75:
            for role in Role:
                drive.cluster.show(role, eighths=number // 15)
        case 90:
            drive.cluster.kill_worker(gpu("n0", 0))


@cache
def written_states() -> tuple[bytes, ...]:
    return tuple(encode_state(state) for state in states())
