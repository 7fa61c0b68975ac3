"""A job whose engines are real SGLang servers on the CPU: it learns, and a server's death costs only what it held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, RunningJob, generating, running, small_job
from tests.e2e.lineage import expected_draws, trained_draws
from tests.sglang_env import sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LAUNCHER = "cpu/launch.py"
MIN_RISE = 0.15
"""Of the reward over the demo's ten iterations: less than half of what was seen, since draws do not repeat."""


def with_sglang(raw: dict[str, Any], **placement: str) -> dict[str, Any]:
    """One engine: a server has 2 GB. Its start may take minutes where others work too."""
    raw["rollout"] = {"engine": "sglang", "sglang": {"python": str(sglang_python()), "start_timeout_s": 290}}
    raw.setdefault("runtime", {})["command_deadline_s"] = 300
    raw["cluster"]["component_placement"] |= placement
    return raw


def servers(job: RunningJob) -> list[psutil.Process]:
    """Without their keepers."""
    return [
        process for process in job.processes() if process.cmdline()[1:2] and process.cmdline()[1].endswith(LAUNCHER)
    ]


async def test_the_demos_job_learns_and_no_sample_is_lost_or_doubled(tmp_path: Path) -> None:
    raw = yaml.safe_load((REPOSITORY / "tidegate" / "demo.yaml").read_text())
    raw["cluster"]["nodes"] = {"n0": 6}
    algorithm = raw["algorithm"]
    want = expected_draws(
        iterations=algorithm["iterations"],
        prompts=algorithm["prompts_per_iteration"],
        group_size=algorithm["group_size"],
    )
    async with running(with_sglang(raw, rollout="4", inference="5"), tmp_path) as job:
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == want
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())
    assert summary["reward_last"] - summary["reward_first"] >= MIN_RISE


async def test_kill_9_of_a_server_in_mid_generation_costs_only_the_regeneration(tmp_path: Path) -> None:
    raw = small_job("killed", cluster__nodes={"n0": 4}, actor__layout={"dp": 2})
    want = expected_draws(iterations=3, prompts=8, group_size=4)
    async with running(with_sglang(raw, actor="0-1", rollout="2", inference="3"), tmp_path) as job:
        await job.until(generating(1))
        (victim,) = servers(job)
        victim.kill()
        failed = await job.until(lambda event: event.WhichOneof("body") == "failed")
        assert failed.source.startswith("rollout")
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == want
        assert max(event.incarnation for event in job.events) == 1
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())
    assert summary["samples_generated"] == want.total(), "what was finished is not generated again"
