"""A cluster whose slots share the device: three jobs are submitted to it, two run side by side, and one waits.

The jobs differ in their names alone. `first_iteration_s` is the time from the command that submits a job to the report
of its first iteration; the third job's includes its wait.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cluster_submit import reported_s
from benchmarks.gpu.demo import DEMO
from benchmarks.gpu.report import PartReport
from tidegate.job import JobFolder
from tidegate.json_text import parse_json

_JOBS = ("one", "two", "late")
_UP = {"cuda": ("--device", "cuda", "--slots-per-gpu", "8"), "cpu": ()}
_HALF = (
    "cluster.nodes={n0: 4}",
    "cluster.component_placement={actor: 0-1, rollout: 2, inference: 3}",
    "actor.layout.dp=1",
    "scheduler.policy=rlinf",
    "actor.warm_up.steps=20",
)
"""Half of the demo's slots."""
_OVERRIDES = {
    "cuda": (*_HALF, "algorithm.iterations=4", "cluster.device=cuda", "cluster.slots_per_gpu=8"),
    # The jobs move GPUs at other times each, and without this their weights are the same but for rounding.
    "cpu": (*_HALF, "algorithm.iterations=1", "actor.num_logical_shards=2"),
}


def measure(device: str, report: PartReport) -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-gpu-") as folder:
        began_s = time.monotonic()
        _tidegate(folder, "up", "n0=8", *_UP[device]).check_returncode()
        report.note({"up_s": time.monotonic() - began_s})
        try:
            summaries = _submitted(folder, device, report)
        finally:
            print(_tidegate(folder, "get", "jobs").stdout, file=sys.stderr)
            began_s = time.monotonic()
            _tidegate(folder, "down").check_returncode()
            report.note({"down_s": time.monotonic() - began_s})
    report.note({"weights_checksums": sorted({str(each["weights_checksum"]) for each in summaries})})
    if bad := [each for each in summaries if each["lost"] or each["duplicates"] or each["samples_trained"] == 0]:
        raise RuntimeError(f"samples were lost or doubled: {bad}")


def _submitted(folder: str, device: str, report: PartReport) -> list[dict[str, object]]:
    """The summaries of the jobs. RuntimeError where one does not finish."""
    began_s, running = {}, {}
    for job in _JOBS:
        began_s[job] = time.time()
        command = _command(folder, "submit", str(DEMO), f"job={job}", *_OVERRIDES[device], "--follow")
        running[job] = subprocess.Popen(command)
    failed = [job for job, process in running.items() if process.wait()]
    if failed:
        raise RuntimeError(f"jobs {', '.join(failed)} did not finish; their own messages are above")
    folders = {job: JobFolder(Path(folder) / job) for job in _JOBS}
    report.note({"first_iteration_s": {job: reported_s(folders[job]) - began_s[job] for job in _JOBS}})
    summaries = [parse_json((folders[job].root / "result.json").read_bytes())["summary"] for job in _JOBS]
    report.note({"wall_s": [each["wall_s"] for each in summaries]})
    return summaries


def _tidegate(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(folder, *words), stdout=subprocess.PIPE, text=True, check=False)


def _command(folder: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "cli", *words, "--output-dir", folder]
