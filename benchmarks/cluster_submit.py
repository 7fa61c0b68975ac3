"""How soon a job begins: submitted to a warm cluster, and started cold by `tidegate run`.

Both begin with the command that a person types, and end when the first iteration has been reported. The jobs take
turns, so that both see the same machine. The first one that is submitted after `up` does not count: it is as cold.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.e2e.jobs import small_job
from tidegate.job import JobFolder
from tidegate.json_text import parse_json

RUNS = 5
LIMIT_S = 120.0
_NODES = ("n0=4", "n1=4")


def submitted(folder: Path, num_runs: int) -> list[dict[str, Any]]:
    """The seconds of both sides. CalledProcessError where a command fails."""
    cold, warm = [], []
    tidegate("up", *_NODES, "--output-dir", str(folder / "warm"))
    try:
        _submitted(folder, "first")
        for number in range(num_runs):
            cold.append(_cold(folder, f"cold{number}"))
            warm.append(_submitted(folder, f"warm{number}"))
    finally:
        tidegate("down", "--output-dir", str(folder / "warm"))
    return [
        {"case": name, "first_iteration_s": median(found), "all_s": [round(each, 2) for each in found]}
        for name, found in (("cold run", cold), ("submitted to a warm cluster", warm))
    ]


def _config(folder: Path, job: str) -> Path:
    path = folder / f"{job}.yaml"
    path.write_text(yaml.safe_dump(small_job(job, algorithm__iterations=1)))
    return path


def _cold(folder: Path, job: str) -> float:
    command = _command("run", str(_config(folder, job)), "--output-dir", str(folder / "cold"))
    began = time.time()
    subprocess.run(command, check=True, capture_output=True)
    return reported_s(JobFolder(folder / "cold" / job)) - began


def _submitted(folder: Path, job: str) -> float:
    path, began = _config(folder, job), time.time()
    tidegate("submit", str(path), "--follow", "--output-dir", str(folder / "warm"))
    return reported_s(JobFolder(folder / "warm" / job)) - began


def reported_s(folder: JobFolder) -> float:
    """When the actor reported the first iteration, in seconds since 1970."""
    return report_times_s(folder)[0]


def report_times_s(folder: JobFolder) -> list[float]:
    """When the actor reported each iteration, in seconds since 1970."""
    events = [parse_json(line)["event"] for line in folder.events.read_text().splitlines()]
    reports = [each for each in events if "iteration_reported" in each and each["source"].startswith("actor")]
    assert reports, f"{folder.events} has no report of an iteration"
    return [int(each["occurred_unix_ns"]) / 1e9 for each in reports]


def tidegate(*words: str) -> None:
    """A command as a person types it. CalledProcessError."""
    subprocess.run(_command(*words), check=True, capture_output=True, timeout=LIMIT_S)


def _command(*words: str) -> Sequence[str]:
    return (sys.executable, "-m", "cli", *words)
