"""The report at the end of every benchmark.

With `--json` the last line of stdout is one object: name, figures (units in the keys), goals, whether they are met,
cases, the basis of the comparison, commit and machine. `--save` writes the same with the command to `results/`.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Report:
    """`goals` are comparisons such as "<= 1.25", by the key of the figure. A goal without a figure is not met."""

    name: str
    figures: Mapping[str, float]
    goals: Mapping[str, str] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()
    against: str = ""

    @property
    def is_met(self) -> bool:
        return all(key in self.figures and _holds(self.figures[key], goal) for key, goal in self.goals.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "figures": dict(self.figures),
            "goals": dict(self.goals),
            "met": self.is_met,
            "cases": list(self.cases),
            "against": self.against,
            "commit": commit(),
            "machine": _machine(),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the smallest and the largest of the runs, and their number."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def arguments(description: str) -> argparse.Namespace:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="a rougher answer within a minute")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results")
    return parser.parse_args()


def publish(report: Report, options: argparse.Namespace) -> int:
    """Print and save the report as the options say. Returns the exit code: 1 if a goal is missed."""
    result = report.to_dict()
    for key, value in report.figures.items():
        print(f"{key:40} {value:10.4g}   {report.goals.get(key, '')}")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        saved = result | {"command": " ".join(["python", "-m", f"benchmarks.{report.name}", *sys.argv[1:]])}
        (RESULTS / f"{report.name}.json").write_text(json.dumps(saved, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    return 0 if report.is_met else 1


def commit() -> str:
    """The commit of this working tree, or `unknown` where it has no repository."""
    said = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


def _holds(value: float, goal: str) -> bool:
    relation, _, bound = goal.partition(" ")
    return bool(_COMPARE[relation](value, float(bound)))


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {model}, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"
