"""The cluster in a container, by `make compose-up` and `make compose-down`. It needs Docker and its compose command.

The image is built before, with what BASE, TORCH_INDEX and COMPOSE in the environment say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.command import execute
from tidegate.json_text import parse_json

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = os.environ.get("COMPOSE", "docker compose -f deploy/compose.yaml").split()
DEMO = "tidegate/demo.yaml"
SHORT = ("algorithm.iterations=2", "actor.num_logical_shards=4")
"""The same bits in every run."""
LOOK_AGAIN_S = 0.5


def printed(*words: str) -> str:
    return subprocess.run(words, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout


def inside(*words: str) -> str:
    return printed(*COMPOSE, "exec", "-T", "cluster", *words)


def inspected() -> dict[str, Any]:
    (found,) = json.loads(printed("docker", "inspect", printed(*COMPOSE, "ps", "--quiet", "cluster").strip()))
    return dict(found)


def state_of(job: str) -> str:
    rows = json.loads(inside("tidegate", "get", "jobs", "-o", "json"))
    return next((str(row["state"]) for row in rows if row["job"] == job), "")


def weights_of(job: str) -> str:
    return str(parse_json(inside("cat", f"/jobs/{job}/result.json"))["summary"]["weights_checksum"])


@pytest.fixture(scope="module")
def seconds_to_health() -> Iterator[float]:
    printed(*COMPOSE, "build", "--quiet")
    began_s = time.monotonic()
    printed("make", "compose-up", f"COMPOSE={' '.join(COMPOSE)}")
    yield time.monotonic() - began_s
    printed("make", "compose-down", f"COMPOSE={' '.join(COMPOSE)}", "ARGS=--volumes")
    assert not printed(*COMPOSE, "ps", "--all", "--quiet")
    assert not printed("docker", "volume", "ls", "--quiet", "--filter", "name=tidegate_jobs")


def test_the_cluster_is_healthy_within_a_minute_and_has_no_network_and_no_rights(seconds_to_health: float) -> None:
    assert seconds_to_health <= 60
    found = inspected()
    host = found["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert inside("id", "-un").strip() == "tidegate"
    assert inside("sh", "-c", "cat /proc/net/dev | tail -n +3 | cut -d: -f1").split() == ["lo"]


def test_a_job_has_the_weights_that_it_has_outside(seconds_to_health: float, tmp_path: Path) -> None:
    printed(*COMPOSE, "cp", DEMO, "cluster:/jobs/demo.yaml")
    inside("tidegate", "submit", "/jobs/demo.yaml", "job=inside", *SHORT, "--follow")
    assert execute(["run", str(REPOSITORY / DEMO), *SHORT, "--output-dir", str(tmp_path)]) == 0
    outside = parse_json((tmp_path / "demo" / "result.json").read_bytes())
    assert weights_of("inside") == outside["summary"]["weights_checksum"]


def test_a_killed_container_is_started_again_and_its_job_goes_on(seconds_to_health: float) -> None:
    printed(*COMPOSE, "cp", DEMO, "cluster:/jobs/demo.yaml")
    inside("tidegate", "submit", "/jobs/demo.yaml", "job=killed", *SHORT, "algorithm.iterations=6")
    while "manifest.json" not in inside("find", "/jobs", "-path", "*killed/checkpoints/*"):
        time.sleep(LOOK_AGAIN_S)
    os.kill(inspected()["State"]["Pid"], signal.SIGKILL)
    while (found := inspected())["RestartCount"] != 1 or found["State"]["Health"]["Status"] != "healthy":
        time.sleep(LOOK_AGAIN_S)
    while (state := state_of("killed")) in ("queued", "placed", "running"):
        time.sleep(LOOK_AGAIN_S)
    assert state == "finished"
    summary = parse_json(inside("cat", "/jobs/killed/result.json"))["summary"]
    assert (summary["lost"], summary["duplicates"], summary["iterations"]) == (0, 0, 6)
