"""What a newer release costs a job that runs in a cluster: taken in place (`tidegate reload`), or by `down` and `up`,
which is what one would do without it.

Jobs train the same on a warm cluster, one after the other: undisturbed, over a reload, and over `down` and `up`, after
their first checkpoint. The time from the first report of an iteration to the last one, less that of the undisturbed job
of the same turn, is what the job has lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.cluster_submit import report_times_s, tidegate
from tests.e2e.jobs import small_job
from tidegate.job import JobFolder
from tidegate.json_text import parse_json

RUNS = 3
ITERATIONS = 40
_NODES = ("n0=4", "n1=4")
_LOOK_AGAIN_S = 0.05


def reloaded(folder: Path, num_runs: int) -> list[dict[str, Any]]:
    """The seconds of both ways. CalledProcessError where a command fails, AssertionError where a sample was lost."""
    ways: dict[str, Callable[[], None]] = {
        "reload": lambda: _tidegate(folder, "reload"),
        "down and up": lambda: _restarted(folder),
    }
    lost: dict[str, list[float]] = {name: [] for name in ways}
    took: dict[str, list[float]] = {name: [] for name in ways}
    _tidegate(folder, "up", *_NODES)
    try:
        _trained_s(folder, "first", lambda: None)
        for number in range(num_runs):
            undisturbed_s, _ = _trained_s(folder, f"undisturbed{number}", lambda: None)
            for name, act in ways.items():
                trained_s, act_s = _trained_s(folder, f"{name.replace(' ', '-')}{number}", act)
                lost[name].append(trained_s - undisturbed_s)
                took[name].append(act_s)
    finally:
        _tidegate(folder, "down")
    return [
        {
            "case": f"another release by {name}",
            "job_lost_s": median(lost[name]),
            "all_lost_s": [round(each, 2) for each in lost[name]],
            "command_s": median(took[name]),
        }
        for name in ways
    ]


def _restarted(folder: Path) -> None:
    _tidegate(folder, "down")
    _tidegate(folder, "up", *_NODES)


def _trained_s(folder: Path, job: str, act: Callable[[], None]) -> tuple[float, float]:
    """From the first report of an iteration to the last one, and the seconds of `act` in between."""
    config = folder / f"{job}.yaml"
    config.write_text(yaml.safe_dump(small_job(job, algorithm__iterations=ITERATIONS)))
    _tidegate(folder, "submit", str(config))
    own = JobFolder(folder / "jobs" / job)
    while not list(own.checkpoints.glob("*/manifest.json")):
        time.sleep(_LOOK_AGAIN_S)
    began_s = time.monotonic()
    act()
    act_s = time.monotonic() - began_s
    _tidegate(folder, "wait", job)
    summary = parse_json(own.result.read_text())["summary"]
    assert (summary["lost"], summary["duplicates"], summary["iterations"]) == (0, 0, ITERATIONS), summary
    times_s = report_times_s(own)
    return times_s[-1] - times_s[0], act_s


def _tidegate(folder: Path, *words: str) -> None:
    tidegate(*words, "--output-dir", str(folder / "jobs"))
