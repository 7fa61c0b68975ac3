"""The demo's job from start to end on slots that share the device, with `tide`.

Its reward must rise, no sample may be lost, and GPUs must move. The timeline is kept: `demo.tide.timeline.json` beside
the result. `deaths` runs the same job with `rlinf`.
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

DEMO = Path(__file__).resolve().parents[2] / "tidegate" / "demo.yaml"
POLICY = "tide"
OVERRIDES = {
    "cuda": ("cluster.device=cuda", "cluster.slots_per_gpu=8"),
    "cpu": ("algorithm.iterations=2", "actor.warm_up.steps=40"),
}
"""What differs from the demo. All its eight slots share the device. On a CPU it is short."""


def measure(device: str, report: PartReport) -> None:
    found = run_demo(POLICY, OVERRIDES[device], report)
    if device == "cpu":  # such a short job's reward need not rise
        return
    if found["reward_last"] <= found["reward_first"]:
        raise RuntimeError(f"the reward fell from {found['reward_first']:.3f} to {found['reward_last']:.3f}")
    if not found["moves"]:
        raise RuntimeError("no GPU moved")


def run_demo(policy: str, overrides: Sequence[str], report: PartReport) -> dict[str, Any]:
    """The run's summary. RuntimeError where the job does not finish, or loses or doubles a sample."""
    changed = [f"scheduler.policy={policy}", *overrides]
    with tempfile.TemporaryDirectory(prefix="tidegate-gpu-") as jobs:
        command = [sys.executable, "-m", "cli", "run", str(DEMO), *changed, "--output-dir", jobs, "-o", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{policy}: the demo ended with {done.returncode}; its own message is above")
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        timeline = Path(summary.pop("timeline"))
        slots = json.loads(timeline.read_text())["otherData"]
        report.keep(f"{policy}.timeline.json", timeline)
    slot_seconds = _seconds_by_state(slots["state_ns"].values())
    report.note({**summary, "slot_seconds_by_state": slot_seconds, "overrides": changed})
    if summary["lost"] or summary["duplicates"] or summary["samples_trained"] == 0:
        raise RuntimeError(f"{policy}: {summary['lost']} samples lost, {summary['duplicates']} doubled")
    return summary


def _seconds_by_state(slots: Sequence[dict[str, int]]) -> dict[str, float]:
    """The time of all slots in each state."""
    total: Counter[str] = Counter()
    for slot in slots:
        total.update(slot)
    return {state: length_ns / 1e9 for state, length_ns in sorted(total.items())}
