"""Runs parts one after the other, and writes each one's result before the next one starts.

Invariants:
- No part's failure keeps another part from running. [test_gpu_runner: a_part_that_fails]
- A result file is whole at any moment, and a part that does not end changes none.
  [test_gpu_runner: a_runner_that_is_killed]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.gpu.limited import Ended, run_limited
from benchmarks.gpu.machine import Facts
from benchmarks.gpu.parts import Part
from benchmarks.gpu.report import SKIPPED_STATUS, PartReport, write_json

_NUM_ROW_FIGURES = 3
"""The figures of a part that its row of the table has. The file has all."""


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """`reason` says why a part has failed or was skipped."""

    part: str
    status: Outcome
    reason: str
    seconds: float
    limit_s: float
    began: str
    command: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        return self.status in (Outcome.FAILED, Outcome.TIMED_OUT)


def run_parts(
    parts: Sequence[Part], *, folder: Path, facts: Facts, commit: str, say: Callable[[str], None]
) -> list[Result]:
    """The results in order. Each is in `folder` as PART.json too, the part's output as PART.log, what it kept as
    PART.NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for part in parts:
        say(f"{part.name}: {part.about} (at most {part.limit_s:.0f} s)")
        result = _run(part, folder / f"{part.name}.log")
        write_json(folder / f"{part.name}.json", {**asdict(result), **facts, "commit": commit})
        say(f"{part.name}: {result.status}" + (f", {result.reason}" if result.reason else ""))
        results.append(result)
    return results


def table(results: Sequence[Result]) -> str:
    width = max(len(result.part) for result in results)
    return "\n".join(
        f"{result.part:{width}}  {result.status:9}  {result.seconds:6.1f} s  {_row_end(result)}".rstrip()
        for result in results
    )


def _run(part: Part, log: Path) -> Result:
    began = datetime.now(tz=UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="tidegate-gpu-") as scratch:
        path = Path(scratch) / "report.json"
        ended = run_limited([sys.executable, *part.command, str(path)], limit_s=part.limit_s, log=log)
        report = PartReport.read(path)
        _keep(report.kept, log.parent, part.name)
    status, reason = _judged(part, ended, report, log)
    command = " ".join(["python", *part.command])
    return Result(part.name, status, reason, round(ended.seconds, 3), part.limit_s, began, command, report.figures)


def _keep(kept: Path, folder: Path, part: str) -> None:
    """Put the part's files beside its result as PART.NAME, in place of those of its former run."""
    for former in folder.glob(f"{part}.*.json"):
        former.unlink()
    if kept.exists():
        for file in kept.iterdir():
            shutil.copyfile(file, folder / f"{part}.{file.name}")


def _judged(part: Part, ended: Ended, report: PartReport, log: Path) -> tuple[Outcome, str]:
    if ended.status is None:
        return Outcome.TIMED_OUT, f"stopped after {part.limit_s:g} s; its output is in {log}"
    if ended.status == SKIPPED_STATUS:
        return Outcome.SKIPPED, report.reason
    if ended.status:
        return Outcome.FAILED, f"{_last_line(log)} (exit {ended.status}); its output is in {log}"
    return Outcome.OK, ""


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _row_end(result: Result) -> str:
    if result.reason:
        return result.reason
    numbers = {key: value for key, value in result.figures.items() if isinstance(value, int | float)}
    return ", ".join(f"{key} {value:.4g}" for key, value in list(numbers.items())[:_NUM_ROW_FIGURES])
