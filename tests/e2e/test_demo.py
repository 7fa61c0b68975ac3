"""The demo as a newcomer sees it: seeds learn, nothing is lost, GPUs move, and both policies end with the same weights.

A seed repeats its samples and weights exactly. Times and moves are those of the machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, running
from tests.e2e.lineage import expected_draws, trained_draws, without_incarnation

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KEYS = {
    "iterations",
    "reward_first",
    "reward_last",
    "samples_generated",
    "samples_trained",
    "samples_filtered",
    "duplicates",
    "lost",
    "failed_rewards",
    "wall_s",
    "timeline",
    "policy",
    "moves",
    "switch_s_median",
    "gpu_time_pct",
    "static_wall_s",
    "arrival_iterations",
    "arrival_iterations_s",
}
OF_THE_MACHINE = {
    "wall_s",
    "timeline",
    "pace",
    "moves",
    "switch_s_median",
    "gpu_time_pct",
    "iterations_s",
    "static_wall_s",
    "static_iterations_s",
    "arrival_iterations_s",
}
"""The figures that differ between two runs of one seed: times, and moves, which follow from times."""
MAX_WALL_S = 240
MIN_RISE = 0.25


async def _demo(folder: Path, *words: str, seed: int) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "demo", *words, "--seed", str(seed), "--output-dir", str(folder)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    said: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return said


def _slots(timeline: Path) -> set[str]:
    trace = json.loads(timeline.read_text())
    return {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_the_demos_reward_rises_and_no_sample_is_lost_or_doubled(seed: int, tmp_path: Path) -> None:
    said = await _demo(tmp_path, seed=seed)
    assert said.keys() >= KEYS
    assert said["reward_last"] - said["reward_first"] >= MIN_RISE
    assert (said["lost"], said["duplicates"]) == (0, 0)
    assert said["samples_generated"] == said["samples_trained"] + said["samples_filtered"]
    assert said["wall_s"] <= MAX_WALL_S
    assert len(_slots(Path(said["timeline"]))) == 8
    assert (said["policy"], said["moves"] > 0) == ("tide", True)
    static = json.loads((tmp_path / "demo-static" / "result.json").read_text())["summary"]
    assert said["weights_checksum"] == static["weights_checksum"]
    assert said["static_wall_s"] == static["wall_s"]
    arrival = json.loads((tmp_path / "demo-arrival" / "result.json").read_text())["summary"]
    assert (arrival["iterations"], arrival["lost"], arrival["duplicates"]) == (said["arrival_iterations"], 0, 0)


async def test_two_runs_of_the_demo_with_one_seed_are_equal(tmp_path: Path) -> None:
    first, second = [await _demo(tmp_path / name, "--policy", "tide", seed=0) for name in ("first", "second")]
    assert {key: first[key] for key in first.keys() - OF_THE_MACHINE} == {
        key: second[key] for key in second.keys() - OF_THE_MACHINE
    }


async def test_the_demos_job_ends_alike_on_two_nodes_and_on_one(tmp_path: Path) -> None:
    raw = yaml.safe_load((REPOSITORY / "tidegate" / "demo.yaml").read_text())
    raw["algorithm"]["iterations"] = 2
    raw["actor"]["warm_up"]["steps"] = 30
    # Elsewhere the bits depend on when responses end.
    raw["actor"]["num_logical_shards"] = 4
    algorithm = raw["algorithm"]
    want = expected_draws(iterations=2, prompts=algorithm["prompts_per_iteration"], group_size=algorithm["group_size"])
    runs = []
    for nodes in ({"n0": 8}, {"n0": 4, "n1": 4}):
        raw["cluster"]["nodes"] = nodes
        folder = tmp_path / f"{len(nodes)}-nodes"
        folder.mkdir()
        async with running(raw, folder) as job:
            summary = (await job.result())["summary"]
            assert trained_draws(job.folder.journal) == want
            runs.append((without_incarnation(job.folder.journal), summary["weights_checksum"]))
        assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())
    assert runs[0] == runs[1]
