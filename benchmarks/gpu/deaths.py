"""The demo's job, of which processes are killed while it runs: an engine, a rank of the trainer, two services.

Nothing may be lost or trained twice. `recovery_s` is the time from a kill to the next iteration's end, to be held
against `iteration_s`, the median time between the ends of iterations after which nothing was killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import psutil

from benchmarks.gpu.demo import DEMO, OVERRIDES
from benchmarks.gpu.report import PartReport

_JOB = ("scheduler.policy=rlinf", "actor.copies=node")
"""The memory of a device goes with its process. Copies in host memory let the job go on without its checkpoint."""
KILLS: Mapping[str, Mapping[int, str]] = {
    "cuda": {1: "rollout engine", 3: "actor rank", 5: "actor service", 7: "rollout service"},
    "cpu": {0: "rollout engine", 1: "actor rank"},
}
"""What is killed once this iteration has ended. The next one runs then."""


def measure(device: str, report: PartReport) -> None:
    iterations = max(KILLS[device]) + 2
    overrides = [*_JOB, *OVERRIDES[device], f"algorithm.iterations={iterations}"]
    with tempfile.TemporaryDirectory(prefix="tidegate-gpu-") as jobs:
        summary, ends, killed = _run(overrides, jobs, KILLS[device])
    between = {number: ends[number] - ends[number - 1] for number in sorted(ends)[1:]}
    calm = [length for number, length in between.items() if number - 1 not in killed]
    report.note(
        {
            "iteration_s": median(calm) if calm else None,
            "recovery_s": {what: round(between[after + 1], 3) for after, what in killed.items()},
            **summary,
            "overrides": overrides,
        }
    )
    if missing := [what for after, what in KILLS[device].items() if after not in killed]:
        raise RuntimeError(f"no process was found to kill: {', '.join(missing)}")
    if summary["lost"] or summary["duplicates"] or summary["samples_trained"] == 0:
        raise RuntimeError(f"{summary['lost']} samples lost, {summary['duplicates']} doubled")


def _run(
    overrides: list[str], jobs: str, kills: Mapping[int, str]
) -> tuple[dict[str, Any], dict[int, float], dict[int, str]]:
    """The run's summary, the time of each iteration's end, and what was killed after which iteration."""
    command = [sys.executable, "-m", "cli", "run", str(DEMO), *overrides, "--output-dir", jobs, "-o", "json"]
    ends: dict[int, float] = {}
    killed: dict[int, str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        for line in job.stderr:
            event = _event(line)
            if event.get("event") != "progress":
                print(line, end="", file=sys.stderr)
            if event.get("event") != "iteration":
                continue
            number = int(event["iteration"])
            ends.setdefault(number, time.monotonic())
            # An iteration that the job goes back to ends twice.
            if number in kills and number not in killed and _kill(job.pid, kills[number]):
                killed[number] = kills[number]
        answer = job.stdout.read()
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}; its own message is above")
    summary: dict[str, Any] = json.loads(answer.splitlines()[-1])
    summary.pop("timeline", None)
    return summary, ends, killed


def _event(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _kill(launcher: int, what: str) -> bool:
    """Kills a process of the job by SIGKILL. False: there is none."""
    role, kind = what.split()
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            title = " ".join(process.cmdline()).rstrip()
        except psutil.Error:
            continue
        is_service = f"-m services.{role} " in f"{title} "
        is_worker = title.startswith("tidegate: ") and f" {role} " in title
        if is_service if kind == "service" else is_worker:
            print(f"kill: {what}, {process.pid}: {title}", file=sys.stderr)
            process.kill()
            return True
    return False
