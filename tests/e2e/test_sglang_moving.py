"""A job whose policy moves GPUs to and from engines with real SGLang servers, one of which is killed in a move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.moves import Move, moves_of
from tests.e2e.jobs import RunningJob, running
from tests.e2e.lineage import expected_draws, trained_draws
from tests.e2e.moving import Moment, Struck, kill, moved, moving_job
from tests.sglang_env import sglang_python
from tidegate.types import GpuId, Role

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ITERATIONS, PROMPTS, GROUP_SIZE = 2, 8, 4
LAUNCHER = "cpu/launch.py"


def sglang_job() -> dict[str, Any]:
    """Two engines, and servers that stand by on the job's two other slots."""
    rollout = {
        "engine": "sglang",
        "sglang": {"python": str(sglang_python()), "dtype": "float32", "start_timeout_s": 290},
        "max_running_requests": 4,
    }
    return moving_job(
        "rlinf",
        algorithm__iterations=ITERATIONS,
        algorithm__prompts_per_iteration=PROMPTS,
        algorithm__group_size=GROUP_SIZE,
        rollout=rollout,
        # A server's start takes both cores for a while: leads and leases have the time that a user's job has.
        runtime={"command_deadline_s": 300},
    )


def its_server(job: RunningJob, move: Move) -> psutil.Process:
    """The server of the first moving GPU. AssertionError where none runs."""
    folder = str(job.folder.engine(GpuId(move.gpus[0])))
    for process in job.processes():
        with suppress(psutil.Error):
            if process.cwd() == folder and process.cmdline()[1:2] and process.cmdline()[1].endswith(LAUNCHER):
                return process
    raise AssertionError(f"no server runs on {move.gpus[0]}")


async def undisturbed(job: RunningJob) -> None:
    """Nothing dies."""


def killed_at(moment: Moment, struck: Struck) -> Callable[[RunningJob], Any]:
    return lambda job: kill(job, moment, struck)


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(undisturbed, id="undisturbed"),
        pytest.param(
            killed_at(Moment(Role.ROLLOUT, "resize", "draining"), its_server), id="a server of an engine that leaves"
        ),
        pytest.param(
            killed_at(Moment(Role.ROLLOUT, "resize", "acquiring"), its_server), id="a server of an engine that comes"
        ),
    ],
)
async def test_a_job_whose_sglang_engines_move_trains_every_sample_once(
    disturb: Callable[[RunningJob], Any], tmp_path: Path
) -> None:
    want = expected_draws(iterations=ITERATIONS, prompts=PROMPTS, group_size=GROUP_SIZE)
    async with running(sglang_job(), tmp_path) as job:
        await disturb(job)
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == want
        assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())
        assert {event.incarnation for event in job.events if event.incarnation} == {1}
        assert moved(job), "some GPU worked for two components"
        assert any(move.role == Role.ROLLOUT for move in moves_of(job.folder).moves)
        elsewhere = set(job.config.slots(Role.ROLLOUT)) - set(job.config.placement(Role.ROLLOUT))
        assert any((job.folder.engine(gpu) / "sglang.log").exists() for gpu in elsewhere), "a server stood by"
