"""`tidegate scale`: asks a live job for another place of its actor, and with `--wait` follows the resize to its end.

The state that the scheduler has applied says when a resize has ended. The job's events say how.

Invariants:
- A wait ends with the resize or with the job, across restarts of the scheduler.
  [test_scaling: a_wait_goes_on_while_the_scheduler]
- A request that no job like this could grant is bad usage. [test_scaling: an_impossible_request_is_bad_usage]
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from cli import job_streams, jobs
from cli.rows import Form, answer_text
from cli.usage import BadUsage
from tidegate.codec import decode_layout, encode_layout
from tidegate.job import JobFolder
from tidegate.launcher.control import NotRunning, control_of
from tidegate.ports.rpc import PeerRefused
from tidegate.types import Layout
from tidegate.v1 import control_pb2, control_pb2_grpc, types_pb2

_IMPOSSIBLE = "ResizeRefused"
"""The scheduler's name for the refusal of a place where the actor can never be."""
_BEAT_S = 0.3


class NotResized(RuntimeError):
    """The resize has ended, and the actor did not get there. The text has the reason."""


@dataclass(frozen=True, slots=True)
class _Place:
    layout: Layout
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.layout} on {', '.join(self.gpus)}"


async def scale(job: str, wish: Layout | int, gpus: list[str], output_dir: Path, form: Form, *, wait: bool) -> int:
    """`wish`: a layout, or a number of GPUs, in copies like the present ones. BadUsage: the actor can never be there.
    NotResized: it did not get there."""
    folder = jobs.job_folder(output_dir, job)
    try:
        async with control_of(folder) as control:
            layout = wish if isinstance(wish, Layout) else await _of_size(control, job, wish)
            request = control_pb2.ResizeActorRequest(job=job, layout=encode_layout(layout), gpus=gpus)
            answer = await control.ResizeActor(request)
    except PeerRefused as refused:
        if refused.error == _IMPOSSIBLE:
            raise BadUsage(f"job {job}: {refused.reason}") from refused
        raise
    place = _Place(decode_layout(answer.layout), tuple(answer.gpus))
    if answer.in_force:
        state, text = "in force", f"is in {place} already"
    elif wait:
        await _follow(folder, place, sequence=answer.stream_sequence)
        state, text = "committed", f"is in {place} now"
    else:
        state, text = "accepted", f"moves to {place}; its events show when it is there"
    row = {"job": job, "asked": "scale", "layout": str(place.layout), "gpus": list(place.gpus), "state": state}
    print(answer_text(row, f"job {job}: its actor {text}", form))
    return 0


async def _of_size(control: control_pb2_grpc.ControlAsyncStub, job: str, num_gpus: int) -> Layout:
    """The actor's layout with as many copies as fill the GPUs. BadUsage where they do not."""
    status = await control.GetJob(control_pb2.GetJobRequest(job=job))
    actor = next((each for each in status.components if each.role == types_pb2.ROLE_ACTOR), None)
    if actor is None or not actor.HasField("layout"):
        raise NotResized(f"job {job}: its actor has no layout now; give one with --layout, such as tp=2,dp=2")
    present = decode_layout(actor.layout)
    size = present.num_ranks // present.dp
    num_copies, rest = divmod(num_gpus, size)
    if rest or not num_copies:
        near = sorted({max(1, num_copies) * size, (num_copies + 1) * size})
        raise BadUsage(
            f"job {job}: {num_gpus} GPUs make no whole copies of its actor, which is {present}, {size} GPUs a copy; "
            f"near: {', '.join(map(str, near))}. --layout changes the copies"
        )
    return replace(present, dp=num_copies)


async def _follow(folder: JobFolder, place: _Place, *, sequence: int) -> None:
    """Returns when the actor got there. `sequence`: of the request's event. NotResized: it did not; NotRunning: the
    run was killed."""
    while True:
        try:
            if await _has_ended(folder, place, sequence):
                why = await _why_not(folder, place, sequence)
                break
        except NotRunning:
            if not job_streams.goes_on_or_is_over(folder):
                raise
        await asyncio.sleep(_BEAT_S)
    if why is not None:
        raise NotResized(f"job {folder.root.name}: its actor did not move to {place}: {why}")


async def _has_ended(folder: JobFolder, place: _Place, sequence: int) -> bool:
    if folder.result.exists():
        return True
    async with control_of(folder) as control:
        status = await control.GetJob(control_pb2.GetJobRequest(job=folder.root.name))
    is_open = any(_Place(decode_layout(each.layout), tuple(each.gpus)) == place for each in status.open_resizes)
    return status.applied_sequence >= sequence and not is_open


async def _why_not(folder: JobFolder, place: _Place, sequence: int) -> str | None:
    """Why the resize did not take effect; None when it did."""
    why = job_streams.end_line(folder) if folder.result.exists() else "it was not done by its deadline"
    async for row in job_streams.events(folder, follow=False, after_sequence=sequence):
        event = row.event
        match event.WhichOneof("body"):
            case "layout_committed":
                committed = event.layout_committed
                if _Place(decode_layout(committed.layout), tuple(grant.gpu for grant in committed.grants)) == place:
                    return None
            case "resize_failed":
                why = event.resize_failed.message
            case "resize_requested":
                later = _Place(decode_layout(event.resize_requested.layout), tuple(event.resize_requested.gpus))
                why = f"a later request, for {later}, replaced it" if later != place else why
    return why
