"""`tidegate migrate` and `tidegate drain`, and the plan of a dry run: what the user reads, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.unit.cli.configs import small_config
from tests.unit.cli.manual_moves import commanded, committed, move, place, released, status, step
from tests.unit.cli.schedulers import MovingScheduler
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claim_folder
from tidegate.types import Layout
from tidegate.v1 import control_pb2

ENGINES = place("rollout", Layout(dp=2), "n0/1", "n0/3")
MIGRATES = move(
    ENGINES,
    steps=[
        step("rollout", "resize", leaves=["n0/2"], layouts=(Layout(dp=2), Layout()), seconds=2.0),
        step("rollout", "resize", comes=["n0/3"], layouts=(Layout(), Layout(dp=2)), seconds=1.5),
    ],
)
DRAINS = move(place("rollout", Layout(), "n0/1"), steps=[step("rollout", "resize", leaves=["n0/2"])], drained=["n0/2"])
TWO = place("rollout", Layout(dp=2), "n0/1", "n0/2")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[JobFolder]:
    """The folder of a job whose launcher lives."""
    with claim_folder(load_job(small_config(tmp_path)), Start.FRESH, now_unix_s=0.0) as claim:
        yield claim.folder


async def test_a_dry_run_prints_the_transitions_with_their_costs_and_waits_for_nothing(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = MovingScheduler(folder, move=MIGRATES)
    assert await commanded(folder, scheduler, "migrate", "--from", "n0/2", "--to", "n0/3", "--dry-run") == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["STEP", "ROLE", "CHANGE", "LEAVES", "COMES", "WAITS", "FOR", "LAYOUT", "SECONDS"],
        ["1", "rollout", "resize", "n0/2", "-", "-", "dp2", "->", "single", "2"],
        ["2", "rollout", "resize", "-", "n0/3", "-", "single", "->", "dp2", "1.5"],
    ]
    assert out.endswith(
        "2 transitions, about 3.5 s one after the other, by the costs that policies plan with; nothing was changed\n"
    )
    (asked,) = scheduler.asked
    assert (asked.dry_run, list(asked.leaving), list(asked.coming)) == (True, ["n0/2"], ["n0/3"])
    assert await commanded(folder, MovingScheduler(folder), "drain", "n0/2", "--dry-run") == 0
    assert capsys.readouterr().out == "job small: nothing would move, and nothing was changed\n"


async def test_a_plan_is_one_value_in_json(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--from", "n0/2", "--to", "n0/3", "--dry-run", "-o", "json"]
    assert await commanded(folder, MovingScheduler(folder, move=MIGRATES), "migrate", *flags) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["asked"], got["state"]) == ("migrate", "planned")
    assert [each["seconds"] for each in got["steps"]] == [2.0, 1.5]


async def test_a_wait_for_an_engine_that_migrates_ends_when_it_is_there(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    course = [committed(3, "rollout", Layout(), "n0/1"), committed(6, "rollout", Layout(dp=2), "n0/1", "n0/3")]
    scheduler = MovingScheduler(folder, *course, move=MIGRATES, status=status(TWO, applied=2, still=[ENGINES]))
    assert await commanded(folder, scheduler, "migrate", "--from", "n0/2", "--to", "n0/3", "--wait") == 0
    assert capsys.readouterr().out == "job small: is there now: rollout dp2 on n0/1, n0/3\n"


async def test_a_drain_is_accepted_and_with_a_wait_ends_when_nobody_has_the_gpu(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    at_work = status(TWO, applied=2, drained=["n0/2"])
    scheduler = MovingScheduler(folder, released(4, "rollout", "n0/2"), move=DRAINS, status=at_work)
    assert await commanded(folder, scheduler, "drain", "n0/2") == 0
    undo = "--undo gives them back to the job\n"
    want = f"job small: drained by hand: n0/2; n0/2 are given back as soon as they can be; {undo}"
    assert capsys.readouterr().out == want
    assert await commanded(folder, scheduler, "drain", "n0/2", "--wait") == 0
    assert capsys.readouterr().out == f"job small: drained by hand: n0/2; nobody has them; {undo}"
    assert [list(asked.targets) for asked in scheduler.asked] == [["n0/2"], ["n0/2"]]


async def test_a_wait_for_a_drain_that_was_undone_ends_with_1(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = MovingScheduler(folder, move=DRAINS, status=status(TWO, applied=5))
    assert await commanded(folder, scheduler, "drain", "n0/2", "--wait") == 1
    assert "job small: n0/2 were not given back: " in capsys.readouterr().err


async def test_a_wait_for_a_drain_of_gpus_that_the_job_uses_after_all_ends_with_1_and_the_reason(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (list(DRAINS.steps), []):
        of = status(TWO, applied=5, drained=["n0/2"], used=["n0/2"])
        scheduler = MovingScheduler(folder, move=move(steps=steps, drained=["n0/2"]), status=of)
        assert await commanded(folder, scheduler, "drain", "n0/2", "--wait") == 1
        why = "a component would have no copy without them, so it uses them"
        assert f"job small: n0/2 were not given back: {why}" in capsys.readouterr().err


async def test_a_drain_of_a_gpu_in_an_open_transition_does_not_say_that_nobody_has_it(
    folder: JobFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.manual_waits.QUIET_S", 0.05)
    comes = control_pb2.GpuStatus(gpu="n0/2", state="acquiring", transition_id="small/t7")
    free = control_pb2.GpuStatus(gpu="n0/2", state="free")
    drains = move(steps=[], drained=["n0/2"])
    at_work = status(place("rollout", Layout(), "n0/1"), applied=2, drained=["n0/2"])
    scheduler = MovingScheduler(folder, move=drains, status=at_work, gpus=[[comes]])
    assert await commanded(folder, scheduler, "drain", "n0/2") == 0
    assert "n0/2 are given back as soon as they can be" in capsys.readouterr().out
    asked = [[comes], [comes], [free]]
    scheduler = MovingScheduler(folder, move=drains, status=at_work, gpus=asked)
    assert await commanded(folder, scheduler, "drain", "n0/2", "--wait") == 0
    assert asked == [[free]]
    assert "nobody has them" in capsys.readouterr().out


async def test_an_undo_says_what_is_still_drained(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for left, want in ((["n0/3"], "n0/3"), ([], "none")):
        scheduler = MovingScheduler(folder, move=move(steps=[], drained=left))
        assert await commanded(folder, scheduler, "drain", "n0/2", "--undo") == 0
        assert scheduler.asked[0].undo
        assert capsys.readouterr().out == f"job small: the GPUs are the job's again; still drained by hand: {want}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["drain", "n0"],
        ["drain", "n0/1", "--undo"],
        ["migrate", "--from", "n0/1", "--to", "n0/2"],
        ["scale", "--actor", "9"],
    ],
    ids=" ".join,
)
async def test_what_cannot_be_is_refused_in_the_schedulers_words_with_2(
    arguments: list[str], folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "n0/1: drained by hand; `tidegate drain JOB n0/1 --undo` gives it back first"
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, reason, "MoveRefused")
    command, *rest = arguments
    assert await commanded(folder, MovingScheduler(folder, refusal=refusal), command, *rest) == 2
    drain = folder.command("drain")
    assert drain == f"tidegate drain small --output-dir {folder.root.parent}"
    want = f"tidegate: job small: n0/1: drained by hand; `{drain} n0/1 --undo` gives it back first\n"
    assert capsys.readouterr().err == want


@pytest.mark.parametrize("gpus", ["n0", "n0/1,", "0", "n0/x"])
async def test_text_that_names_no_gpu_is_refused_with_one_that_does(
    gpus: str, folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await commanded(folder, MovingScheduler(folder), "migrate", "--from", gpus, "--to", "n0/1") == 2
    assert "is no GPU such as n0/0: `tidegate get gpus` lists them" in capsys.readouterr().err
