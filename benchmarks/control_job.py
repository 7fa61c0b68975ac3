"""A real job on modelled slots whose GPUs move: the scheduler's CPU while iterations run, and the parts of moves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.control_moves import Records, SlotMove, slot_moves
from tidegate.config.files import Sources, load_sources
from tidegate.job import JobFolder

PACED = Path(__file__).resolve().parent.parent / "examples" / "paced.yaml"
CHANGES = (
    # The pace of its GPUs: a job in less time has as many events in less of it.
    "cluster.pace.time_scale=1",
    "algorithm.iterations=2",
    "algorithm.prompts_per_iteration=32",
    "actor.max_tokens_per_microbatch=256",
    "scheduler.policy=tide",
)
QUICK = ("cluster.pace.time_scale=0.05", "scheduler.decide_every_s=0.25", "scheduler.tide.least_gain_s=0.3")
_SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Ran:
    """`cpu`: (Unix seconds, CPU seconds of the scheduler so far), as they were sampled."""

    moves: list[SlotMove]
    cpu: list[tuple[float, float]]
    iterations: list[tuple[float, float]]
    """When each iteration opened and was reported, in Unix seconds."""
    num_events: int

    @property
    def cpu_shares(self) -> list[float]:
        """The scheduler's CPU seconds over the wall seconds of each iteration, of one core."""
        return [(_at(self.cpu, end) - _at(self.cpu, start)) / (end - start) for start, end in self.iterations]


def run_job(folder: Path, *changes: str) -> Ran:
    """Run the job to its end. RuntimeError where it does not finish."""
    words = [*CHANGES, *changes, f"output_dir={folder}"]
    job = JobFolder.of(load_sources(Sources([PACED], overrides=words)).config)
    command = [sys.executable, "-m", "cli", "run", str(PACED), *words]
    cpu: list[tuple[float, float]] = []
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        while process.poll() is None:
            cpu += _sampled(job)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_EVERY_S)
    if process.returncode:
        raise RuntimeError(f"the job ended with {process.returncode}: {(folder / 'out').read_text()[-2000:]}")
    records = Records.read(job)
    return Ran(
        moves=slot_moves(records),
        cpu=cpu,
        iterations=list(records.iterations),
        num_events=sum(1 for _ in job.events.open()),
    )


def _sampled(job: JobFolder) -> list[tuple[float, float]]:
    """Nothing while the scheduler does not serve."""
    with suppress(FileNotFoundError, ValueError, KeyError, psutil.Error):
        used = psutil.Process(json.loads(job.endpoint.read_text())["pid"]).cpu_times()
        return [(time.time(), used.user + used.system)]
    return []


def _at(samples: Sequence[tuple[float, float]], at_s: float) -> float:
    """The CPU seconds at a moment, between two samples by a straight line."""
    place = bisect_left(samples, (at_s, 0.0))
    if place in (0, len(samples)):
        raise RuntimeError("the scheduler was not sampled through the iteration")
    (before_s, before), (after_s, after) = samples[place - 1], samples[place]
    return before + (after - before) * (at_s - before_s) / (after_s - before_s)
