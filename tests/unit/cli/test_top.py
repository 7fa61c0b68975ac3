"""`tidegate top` of a live job and of an ended one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from cli.rows import Form
from cli.top import Figures, figure_lines, top
from tests.unit.cli.configs import small_config
from tests.unit.cli.moving_jobs import LINES, moved_job
from tests.unit.cli.schedulers import LeavingScheduler, end_job, served
from tidegate.codec import encode_layout
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claim_folder
from tidegate.moves_log import MovesLog
from tidegate.types import Layout
from tidegate.v1 import control_pb2, events_pb2, types_pb2


class ShowingScheduler(LeavingScheduler):
    """A job at work, whose figures are its last events. It ends after `num_looks` looks."""

    def __init__(self, folder: JobFolder, *, num_looks: int = 10**6) -> None:
        super().__init__(folder)
        self.asked_after: list[int] = []
        self._num_looks = num_looks

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        status = control_pb2.GetJobResponse(
            job="small", phase="running", iteration=1, num_iterations=3, incarnation=1, last_reason="tide: waits"
        )
        token = types_pb2.Token(term=1, counter=1)
        grants = [types_pb2.Grant(gpu=gpu, token=token) for gpu in ("n0/0", "n0/1")]
        status.drained_gpus.append("n0/3")
        status.components.add(role=types_pb2.ROLE_ACTOR, state="up", layout=encode_layout(Layout(dp=2)), grants=grants)
        return status

    async def ListEvents(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ListEventsResponse]:
        self.asked_after.append(request.after_sequence)
        engine = events_pb2.Engine(gpus=["n0/2"], rate_tokens_per_s=250.0)
        bodies: list[dict[str, Any]] = [
            {"progress": events_pb2.Progress(phase="train", num_done=2, num_total=4), "role": types_pb2.ROLE_ACTOR},
            {"backlog": events_pb2.Backlog(queue="scored", num_messages=5)},
            {"generation": events_pb2.Generation(engines=[engine], places=[0, -3, -1])},
        ]
        for sequence, body in enumerate(bodies, start=7):
            if sequence > request.after_sequence:
                yield control_pb2.ListEventsResponse(stream_sequence=sequence, event=events_pb2.Event(**body))

    async def ListGpus(self, request: Any, context: Any) -> control_pb2.ListGpusResponse:
        if len(self.asked_after) >= self._num_looks:
            end_job(self._folder, [], [])
        rows = [
            control_pb2.GpuStatus(gpu="n0/0", state="owned", job="small", role=types_pb2.ROLE_ACTOR),
            control_pb2.GpuStatus(gpu="n0/2", state="owned", transition_id="small/1/t5"),
        ]
        return control_pb2.ListGpusResponse(gpus=rows)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


async def test_the_view_of_a_live_job_has_gpus_backlog_rates_and_the_last_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claim_folder(load_job(small_config(tmp_path)), Start.FRESH, now_unix_s=0.0) as claim:
        MovesLog(claim.folder.moves).append(LINES)
        where = ["small", "--output-dir", str(claim.folder.root.parent)]
        async with served(claim.folder, ShowingScheduler(claim.folder)):
            assert await asyncio.to_thread(main, ["top", *where, "--once"]) == 0
            out = capsys.readouterr().out
            assert await asyncio.to_thread(main, ["top", *where, "-o", "json"]) == 0
            value = json.loads(capsys.readouterr().out)
    for want in (
        "job small: running, iteration 1 of 3",
        "train 2/4",
        "n0/0, n0/1",
        "moving: n0/2",
        "drained by hand: n0/3",
        "waiting: 5 scored groups",
        "rollout: 2 of 3 sequences unfinished, 250 tokens/s",
        "1 move in 0.5 s of switches",
        "actor resize -n0/2 open: the actor grows",
        "last decision: tide: waits",
    ):
        assert want in out
    assert value["rates"]["backlog"] == {"scored": 5}
    assert [each["transition"] for each in value["moves"]] == ["small/1/t5", "small/1/t4"]


def test_the_figures_of_a_large_job_have_units_and_fit_80_columns() -> None:
    engine = events_pb2.Engine(gpus=["n0/2"], rate_tokens_per_s=1_234_567.8)
    figures = Figures()
    bodies: list[dict[str, Any]] = [
        {"backlog": events_pb2.Backlog(queue="generated", num_messages=12_345)},
        {"backlog": events_pb2.Backlog(queue="scored", num_messages=12_345)},
        {"generation": events_pb2.Generation(engines=[engine], places=[0] * 65_536 + [-3] * 65_536)},
        {"inferring": events_pb2.Inferring(rate_tokens_per_s_per_gpu=1_234_567.8)},
    ]
    for body in bodies:
        figures.take(control_pb2.ListEventsResponse(event=events_pb2.Event(**body)))
    lines = list(figure_lines(figures.rates()))
    assert lines == [
        "waiting: 12345 generated groups, 12345 scored groups",
        "rollout: 65536 of 131072 sequences unfinished, 1234568 tokens/s",
        "inference: 1234568 tokens/s on each GPU",
    ]
    assert max(map(len, lines)) <= 80


async def test_a_terminal_is_drawn_again_until_the_job_ends_and_each_event_is_read_once(
    tmp_path: Path,
) -> None:
    out = Terminal()
    with claim_folder(load_job(small_config(tmp_path)), Start.FRESH, now_unix_s=0.0) as claim:
        scheduler = ShowingScheduler(claim.folder, num_looks=3)
        async with served(claim.folder, scheduler), asyncio.timeout(20):
            assert await top(claim.folder, Form.TABLE, once=False, beat_s=0.01, out=out) == 0
    drawn = out.getvalue().split("\x1b[H\x1b[2J")[1:]
    assert len(drawn) == 4
    assert "train 2/4" in drawn[2]
    assert "job small: cancelled" in drawn[3]
    assert scheduler.asked_after == [0, 9, 9]


def test_the_view_of_an_ended_job_comes_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "small", "--output-dir", str(moved_job(tmp_path).root.parent)]) == 0
    out = capsys.readouterr().out
    assert "job small: finished, iteration 2 of 2" in out
    assert "actor resize +n0/1 committed in 0.50 s: the actor grows" in out
