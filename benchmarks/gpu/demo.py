"""The demo's job from start to end on slots that share the device. Its reward must rise and no sample may be lost.

Its timeline is kept: `demo.timeline.json` beside the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import PartReport

_DEMO = Path(__file__).resolve().parents[2] / "tidegate" / "demo.yaml"
OVERRIDES = {
    "cuda": ("cluster.device=cuda", "cluster.slots_per_gpu=8"),
    "cpu": ("algorithm.iterations=2", "actor.warm_up.steps=40"),
}
"""What differs from the demo. All its eight slots share the device. On a CPU it is short."""


def measure(device: str, report: PartReport) -> None:
    found = run_demo(OVERRIDES[device], report)
    # A short demo's reward need not rise.
    if device == "cuda" and found["reward_last"] <= found["reward_first"]:
        raise RuntimeError(f"the reward fell from {found['reward_first']:.3f} to {found['reward_last']:.3f}")


def run_demo(overrides: Sequence[str], report: PartReport) -> dict[str, Any]:
    """The run's summary. RuntimeError where the job does not finish, or loses or doubles a sample."""
    with tempfile.TemporaryDirectory(prefix="tidegate-gpu-") as jobs:
        command = [sys.executable, "-m", "cli", "run", str(_DEMO), *overrides, "--output-dir", jobs, "-o", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the demo ended with {done.returncode}; its own message is above")
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        timeline = Path(summary.pop("timeline"))
        slots = json.loads(timeline.read_text())["otherData"]
        report.keep("timeline.json", timeline)
    report.note(summary)
    report.note({"slot_seconds_by_state": _seconds_by_state(slots["state_ns"].values()), "overrides": list(overrides)})
    if summary["lost"] or summary["duplicates"] or summary["samples_trained"] == 0:
        raise RuntimeError(f"{summary['lost']} samples lost, {summary['duplicates']} doubled")
    return summary


def _seconds_by_state(slots: Sequence[dict[str, int]]) -> dict[str, float]:
    """The time of all slots in each state."""
    total: Counter[str] = Counter()
    for slot in slots:
        total.update(slot)
    return {state: length_ns / 1e9 for state, length_ns in sorted(total.items())}
