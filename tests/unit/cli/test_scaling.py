"""`tidegate scale` against a scheduler that plays a resize: what the user reads, and the exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cli.__main__ import main
from tests.unit.cli.configs import small_config
from tests.unit.cli.schedulers import ResizingScheduler, served
from tidegate.codec import encode_layout
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claim_folder
from tidegate.launcher.outcome import End
from tidegate.types import Layout
from tidegate.v1 import control_pb2, events_pb2, types_pb2

TO, GPUS = Layout(cp=2), ("n0/0", "n0/1")
PLACE = control_pb2.ActorPlace(layout=encode_layout(TO), gpus=GPUS)
OPEN = control_pb2.GetJobResponse(applied_sequence=2, open_resizes=[PLACE])
NOT_APPLIED = control_pb2.GetJobResponse(applied_sequence=1)
OVER = control_pb2.GetJobResponse(applied_sequence=9)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[JobFolder]:
    """The folder of a job whose launcher lives."""
    with claim_folder(load_job(small_config(tmp_path)), Start.FRESH, now_unix_s=0.0) as claim:
        yield claim.folder


def committed(sequence: int, layout: Layout, *gpus: str) -> control_pb2.ListEventsResponse:
    grants = [types_pb2.Grant(gpu=gpu, token=types_pb2.Token(term=1, counter=1)) for gpu in gpus]
    body = events_pb2.LayoutCommitted(layout=encode_layout(layout), grants=grants)
    return control_pb2.ListEventsResponse(stream_sequence=sequence, event=events_pb2.Event(layout_committed=body))


def failed(sequence: int, message: str) -> control_pb2.ListEventsResponse:
    event = events_pb2.Event(resize_failed=events_pb2.ResizeFailed(message=message))
    return control_pb2.ListEventsResponse(stream_sequence=sequence, event=event)


def requested(sequence: int, layout: Layout, *gpus: str) -> control_pb2.ListEventsResponse:
    event = events_pb2.Event(resize_requested=events_pb2.ResizeRequested(layout=encode_layout(layout), gpus=gpus))
    return control_pb2.ListEventsResponse(stream_sequence=sequence, event=event)


async def scaled(folder: JobFolder, scheduler: ResizingScheduler, *flags: str) -> int:
    place = ["--layout", "cp=2", "--gpus", ",".join(GPUS)]
    arguments = ["scale", folder.root.name, *place, "--output-dir", str(folder.root.parent), *flags]
    async with served(folder, scheduler):
        return await asyncio.to_thread(main, arguments)


async def test_a_request_for_the_place_in_force_says_so_and_is_no_fault(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ((), ("--wait",)):
        assert await scaled(folder, ResizingScheduler(folder, in_force=True), *flags) == 0
        assert capsys.readouterr().out == "job small: its actor is in cp2 on n0/0, n0/1 already\n"


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
async def test_without_a_wait_the_command_ends_when_the_request_is_accepted(
    form: str, read: Callable[[str], Any], folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await scaled(folder, ResizingScheduler(folder), "-o", form) == 0
    want = {"job": "small", "asked": "scale", "layout": "cp2", "gpus": list(GPUS), "state": "accepted"}
    assert read(capsys.readouterr().out) == want


async def test_a_wait_goes_on_while_the_scheduler_starts_again_and_ends_with_the_commit(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, own = failed(1, "of an earlier request"), [requested(2, TO, *GPUS), committed(5, TO, *GPUS)]
    course = [(NOT_APPLIED, [earlier]), (OPEN, [earlier]), None, (OVER, [earlier, *own])]
    assert await scaled(folder, ResizingScheduler(folder, *course), "--wait") == 0
    assert capsys.readouterr().out == "job small: its actor is in cp2 on n0/0, n0/1 now\n"


REFUSED = {
    "a member that cannot prepare": ([failed(4, "out of memory")], "out of memory"),
    "another place was committed": (
        [committed(4, Layout(dp=2), *GPUS), committed(5, TO, "n0/1", "n0/0")],
        "it was not done by its deadline",
    ),
    "a later request": (
        [requested(2, TO, *GPUS), requested(3, Layout(), "n0/0")],
        "a later request, for single on n0/0, replaced it",
    ),
    "nothing happened": ([], "it was not done by its deadline"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wait_for_a_resize_that_failed_ends_with_1_and_the_reason(
    case: str, folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, why = REFUSED[case]
    assert await scaled(folder, ResizingScheduler(folder, (OPEN, []), (OVER, rows)), "--wait") == 1
    assert capsys.readouterr().err == f"tidegate: job small: its actor did not move to cp2 on n0/0, n0/1: {why}\n"


async def test_a_wait_ends_with_the_job(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert await scaled(folder, ResizingScheduler(folder, (OPEN, []), End.CANCELLED), "--wait") == 1
    assert capsys.readouterr().err.endswith("did not move to cp2 on n0/0, n0/1: job small cancelled: enough\n")


async def test_an_impossible_request_is_bad_usage_in_the_schedulers_own_words(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "layout cp2 does not fit: because", "ResizeRefused")
    assert await scaled(folder, ResizingScheduler(folder, refusal=refusal)) == 2
    assert capsys.readouterr().err == "tidegate: job small: layout cp2 does not fit: because\n"


async def test_a_request_that_comes_at_the_wrong_time_fails_in_the_schedulers_own_words(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "job small is paused", "NotNow")
    assert await scaled(folder, ResizingScheduler(folder, refusal=refusal)) == 1
    assert capsys.readouterr().err == "tidegate: job small is paused\n"


async def test_a_machine_that_is_too_busy_to_answer_is_not_told_as_a_killed_run(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "")
    assert await scaled(folder, ResizingScheduler(folder, refusal=refusal)) == 1
    want = "job small gave no answer: its run lives, so the machine is busy or its scheduler starts again; try again"
    assert capsys.readouterr().err == f"tidegate: {want}\n"


class SizedScheduler(ResizingScheduler):
    """Its actor has copies of two GPUs."""

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        status = control_pb2.GetJobResponse(job="small", phase="running")
        status.components.add(role=types_pb2.ROLE_ACTOR, state="up", layout=encode_layout(Layout(tp=2, dp=1)))
        return status


@pytest.mark.parametrize(
    ("size", "code", "want"),
    [
        ("4", 0, "job small: its actor moves to tp2-dp2"),
        ("3", 2, "3 GPUs make no whole copies of its actor, which is tp2, 2 GPUs a copy; near: 2, 4"),
        ("1", 2, "1 GPUs make no whole copies of its actor, which is tp2, 2 GPUs a copy; near: 2."),
        ("0", 2, "'0' is not a number of GPUs from 1 to"),
    ],
)
async def test_a_number_of_gpus_makes_copies_like_the_present_ones(
    size: str, code: int, want: str, folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["scale", folder.root.name, "--actor", size, "--output-dir", str(folder.root.parent)]
    async with served(folder, SizedScheduler(folder)):
        assert await asyncio.to_thread(main, arguments) == code
    said = capsys.readouterr()
    assert want in said.out + said.err
