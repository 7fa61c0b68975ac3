"""`tidegate scale` against a scheduler that plays a move: what is asked, what the user reads, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from tests.unit.cli.configs import small_config
from tests.unit.cli.manual_moves import commanded, committed, failed, move, place, released, requested, status, step
from tests.unit.cli.schedulers import MovingScheduler
from tidegate.codec import decode_layout
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claim_folder
from tidegate.launcher.outcome import End
from tidegate.types import Layout
from tidegate.v1 import control_pb2

BEFORE = place("actor", Layout(), "n0/0")
TO = place("actor", Layout(cp=2), "n0/0", "n0/1")
GROWS = move(TO, steps=[step("actor", "resize", comes=["n0/1"])])
OPEN = status(BEFORE, applied=2, still=[TO])
CLOSED = status(BEFORE, applied=9)
ENGINES = place("rollout", Layout(dp=2), "n0/2", "n0/3")
BOTH = move(TO, ENGINES, steps=[step("rollout", "resize", leaves=["n0/1"]), step("actor", "resize", comes=["n0/1"])])
BOTH_OPEN = status(BEFORE, place("rollout", Layout(dp=3), "n0/1", "n0/2", "n0/3"), applied=2, still=[TO, ENGINES])
LAYOUT = ("--layout", "cp=2", "--gpus", "n0/0,n0/1")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[JobFolder]:
    """The folder of a job whose launcher lives."""
    with claim_folder(load_job(small_config(tmp_path)), Start.FRESH, now_unix_s=0.0) as claim:
        yield claim.folder


async def scaled(folder: JobFolder, scheduler: MovingScheduler, *flags: str) -> int:
    return await commanded(folder, scheduler, "scale", *LAYOUT, *flags)


async def test_a_number_of_gpus_is_asked_for_each_component_that_is_named(folder: JobFolder) -> None:
    scheduler = MovingScheduler(folder, move=BOTH)
    assert await commanded(folder, scheduler, "scale", "--actor", "2", "--inference", "1", "--gpus", "n0/1,n0/0") == 0
    (asked,) = scheduler.asked
    assert (asked.actor, asked.inference, list(asked.gpus)) == (2, 1, ["n0/1", "n0/0"])
    assert (asked.HasField("rollout"), asked.HasField("layout"), asked.dry_run) == (False, False, False)
    assert await scaled(folder, scheduler, "--dry-run") == 0
    assert (decode_layout(scheduler.asked[1].layout), scheduler.asked[1].dry_run) == (Layout(cp=2), True)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ([], "scale needs --actor N, --layout AXES, --rollout N or --inference N; several make one move"),
        (["--rollout", "2", "--gpus", "n0/0"], "--gpus names the actor's GPUs, so give --actor N or --layout AXES too"),
        (["--rollout", "0"], "'0' is not a number of GPUs from 1 to"),
        (["--actor", "2", "--layout", "dp=2"], "not allowed with argument --actor"),
        (["--actor", "2", "--wait", "--dry-run"], "not allowed with argument --wait"),
    ],
)
async def test_arguments_that_ask_for_nothing_are_bad_usage(
    arguments: list[str], want: str, folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = MovingScheduler(folder)
    assert await commanded(folder, scheduler, "scale", *arguments) == 2
    assert want in capsys.readouterr().err
    assert scheduler.asked == []


async def test_a_request_for_the_place_in_force_says_so_and_is_no_fault(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ((), ("--wait",)):
        assert await scaled(folder, MovingScheduler(folder, move=move(TO, steps=[])), *flags) == 0
        assert capsys.readouterr().out == "job small: is there already: actor cp2 on n0/0, n0/1\n"


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
async def test_without_a_wait_the_command_ends_when_the_request_is_accepted(
    form: str, read: Callable[[str], Any], folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await scaled(folder, MovingScheduler(folder, move=GROWS), "-o", form) == 0
    got = read(capsys.readouterr().out)
    assert {name: got[name] for name in ("job", "asked", "state", "places", "drained_gpus")} == {
        "job": "small",
        "asked": "scale",
        "state": "accepted",
        "places": {"actor": {"layout": "cp2", "gpus": ["n0/0", "n0/1"]}},
        "drained_gpus": [],
    }
    assert [(each["role"], each["change"], each["comes"]) for each in got["steps"]] == [("actor", "resize", ["n0/1"])]


async def test_a_wait_goes_on_while_the_scheduler_starts_again_and_ends_with_the_commit(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    course = [failed(1, "of an earlier request"), requested(2), None, committed(5, "actor", Layout(cp=2), *TO.gpus)]
    assert await scaled(folder, MovingScheduler(folder, *course, move=GROWS, status=OPEN), "--wait") == 0
    assert capsys.readouterr().out == "job small: is there now: actor cp2 on n0/0, n0/1\n"


async def test_a_wait_ends_once_the_scheduler_has_applied_the_last_event(folder: JobFolder) -> None:
    course = [requested(2), committed(5, "actor", Layout(cp=2), *TO.gpus)]
    scheduler = MovingScheduler(folder, *course, move=GROWS, status=OPEN)
    scheduler.num_behind = 4
    assert await scaled(folder, scheduler, "--wait") == 0
    assert scheduler.num_behind == 0


async def test_a_wait_ends_when_every_component_is_there_in_whatever_order_of_its_engines(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    course = [
        requested(2),
        committed(3, "rollout", Layout(dp=2), "n0/3", "n0/2"),
        released(4, "rollout", "n0/1"),
        committed(5, "actor", Layout(cp=2), *TO.gpus),
    ]
    assert await scaled(folder, MovingScheduler(folder, *course, move=BOTH, status=BOTH_OPEN), "--wait") == 0
    want = "job small: is there now: actor cp2 on n0/0, n0/1; rollout dp2 on n0/2, n0/3\n"
    assert capsys.readouterr().out == want


REFUSED: dict[str, tuple[list[control_pb2.ListEventsResponse | End | None], str]] = {
    "a member that cannot prepare": ([failed(4, "out of memory"), None], "out of memory"),
    "another place was committed": (
        [committed(4, "actor", Layout(cp=2), "n0/1", "n0/0"), None],
        "it was not done by its deadline",
    ),
    "a later request": ([requested(2), requested(3), None], "a later request replaced it"),
    "nothing happened": ([], "it was not done by its deadline"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wait_for_a_move_that_failed_ends_with_1_and_the_reason(
    case: str, folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, why = REFUSED[case]
    course = [each for each in rows if each is not None]
    assert await scaled(folder, MovingScheduler(folder, *course, move=GROWS, status=CLOSED), "--wait") == 1
    want = f"tidegate: job small: its components did not get to actor cp2 on n0/0, n0/1: {why}\n"
    assert capsys.readouterr().err == want


async def test_a_wait_ends_with_the_job(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = MovingScheduler(folder, requested(2), End.CANCELLED, move=GROWS, status=OPEN)
    assert await scaled(folder, scheduler, "--wait") == 1
    assert capsys.readouterr().err.endswith("did not get to actor cp2 on n0/0, n0/1: job small cancelled: enough\n")


async def test_an_impossible_request_is_bad_usage_in_the_schedulers_own_words(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "layout cp2 does not fit: because", "MoveRefused")
    assert await scaled(folder, MovingScheduler(folder, refusal=refusal)) == 2
    assert capsys.readouterr().err == "tidegate: job small: layout cp2 does not fit: because\n"


async def test_a_request_that_comes_at_the_wrong_time_fails_in_the_schedulers_own_words(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "job small is paused", "NotNow")
    assert await scaled(folder, MovingScheduler(folder, refusal=refusal)) == 1
    assert capsys.readouterr().err == "tidegate: job small is paused\n"


async def test_a_machine_that_is_too_busy_to_answer_is_not_told_as_a_killed_run(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "")
    assert await scaled(folder, MovingScheduler(folder, refusal=refusal)) == 1
    want = (
        "job small gave no answer: its run lives, so it is ending, its scheduler starts again, or the machine is busy; "
        "try again"
    )
    assert capsys.readouterr().err == f"tidegate: {want}\n"
