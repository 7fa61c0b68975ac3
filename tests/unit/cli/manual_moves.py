"""The scheduler's answers to manual moves, and the events of a job that makes them."""

from __future__ import annotations

import asyncio
from typing import Any

from cli.__main__ import main
from tests.unit.cli.schedulers import MovingScheduler, served
from tidegate.codec import encode_layout
from tidegate.job import JobFolder
from tidegate.types import Layout
from tidegate.v1 import control_pb2, events_pb2, types_pb2

ROLES = {"actor": types_pb2.ROLE_ACTOR, "rollout": types_pb2.ROLE_ROLLOUT, "inference": types_pb2.ROLE_INFERENCE}


def place(role: str, layout: Layout, *gpus: str) -> types_pb2.RolePlace:
    return types_pb2.RolePlace(role=ROLES[role], layout=encode_layout(layout), gpus=gpus)


def move(
    *places: types_pb2.RolePlace, steps: list[control_pb2.PlannedStep], drained: list[str] | None = None
) -> control_pb2.ManualMove:
    return control_pb2.ManualMove(places=places, steps=steps, drained_gpus=drained)


def step(
    role: str,
    change: str,
    *,
    leaves: list[str] | None = None,
    comes: list[str] | None = None,
    waits_for: list[str] | None = None,
    layouts: tuple[Layout, Layout] | None = None,
    seconds: float | None = None,
) -> control_pb2.PlannedStep:
    return control_pb2.PlannedStep(
        role=ROLES[role],
        change=change,
        leaves=leaves,
        comes=comes,
        waits_for=waits_for,
        old_layout=encode_layout(layouts[0]) if layouts else None,
        new_layout=encode_layout(layouts[1]) if layouts else None,
        estimated_s=seconds,
    )


def status(
    *at_work: types_pb2.RolePlace,
    applied: int,
    still: list[types_pb2.RolePlace] | None = None,
    drained: list[str] | None = None,
    used: list[str] | None = None,
) -> control_pb2.GetJobResponse:
    """Where the components are, the places that are `still` open, and the drained GPUs that are `used` after all."""
    components = [
        control_pb2.ComponentStatus(role=each.role, state="up", layout=each.layout, grants=grants(*each.gpus))
        for each in at_work
    ]
    return control_pb2.GetJobResponse(
        job="small",
        phase="running",
        components=components,
        applied_sequence=applied,
        open_places=still,
        drained_gpus=drained,
        used_drained_gpus=used,
    )


def grants(*gpus: str) -> list[types_pb2.Grant]:
    return [types_pb2.Grant(gpu=gpu, token=types_pb2.Token(term=1, counter=1)) for gpu in gpus]


def row(sequence: int, role: str, **body: Any) -> control_pb2.ListEventsResponse:
    event = events_pb2.Event(source=f"{role}@n0" if role in ROLES else role, **body)
    return control_pb2.ListEventsResponse(stream_sequence=sequence, event=event)


def committed(sequence: int, role: str, layout: Layout, *gpus: str) -> control_pb2.ListEventsResponse:
    body = events_pb2.LayoutCommitted(layout=encode_layout(layout), grants=grants(*gpus))
    return row(sequence, role, layout_committed=body)


def released(sequence: int, role: str, *gpus: str) -> control_pb2.ListEventsResponse:
    return row(sequence, role, gpus_released=events_pb2.GpusReleased(grants=grants(*gpus)))


def failed(sequence: int, message: str) -> control_pb2.ListEventsResponse:
    return row(sequence, "actor", resize_failed=events_pb2.ResizeFailed(message=message))


def requested(sequence: int) -> control_pb2.ListEventsResponse:
    return row(sequence, "control", split_requested=events_pb2.SplitRequested())


async def commanded(folder: JobFolder, scheduler: MovingScheduler, command: str, *arguments: str) -> int:
    """The exit code of the command against this scheduler."""
    whole = [command, folder.root.name, *arguments, "--output-dir", str(folder.root.parent)]
    async with served(folder, scheduler):
        return await asyncio.to_thread(main, whole)
