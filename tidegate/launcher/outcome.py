"""The outcome of a run: its end, the figures of its iterations, and the file that later commands read.

Invariants:
- `summary` has the same keys for every run. [test_outcome: run_without_iterations]
- Two runs of one seed have the same values, except `wall_s`, `timeline` and `pace`.
  [test_demo: with_one_seed_are_equal]
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from tidegate.codec import message_of_json
from tidegate.json_text import parse_json, typed
from tidegate.pace.steps import PacedSteps
from tidegate.types import Role
from tidegate.v1 import control_pb2, types_pb2


class End(StrEnum):
    """How a run ended. The first three are the scheduler's own phases."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """Stopped from outside with work left, by a signal or the death of its servers. The job can be resumed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`job` is the scheduler's last report, with the job's whole history. `seconds` are those of each iteration, as far
    as its events are known."""

    end: End
    message: str
    seed: int
    wall_s: float
    job: control_pb2.GetJobResponse
    timeline: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict)
    pace: PacedSteps | None = None
    """The steps of this start, for a job with `cluster.pace`."""
    stopped_by: signal.Signals | None = None
    """Not in the file: it decides only the launcher's exit code."""
    has_begun: bool = True
    """Not in the file, which is written only by a run that has begun."""

    @property
    def reason(self) -> str:
        """The message, for a reader who has read the end already."""
        return without_phase(self.message, self.end)

    @property
    def iterations(self) -> list[control_pb2.IterationSummary]:
        """The iterations in order. An iteration that was repeated after a restart has its later report."""
        latest = {row.iteration: row for row in sorted(self.job.iterations, key=lambda row: row.incarnation)}
        return [latest[iteration] for iteration in sorted(latest)]

    def summary(self) -> dict[str, Any]:
        rows = self.iterations
        rewards = [row.metrics["reward_mean"] for row in rows if "reward_mean" in row.metrics]
        return {
            "iterations": len(rows),
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "samples_generated": sum(row.num_generated for row in rows),
            "samples_trained": sum(row.num_trained for row in rows),
            "samples_filtered": sum(row.num_filtered for row in rows),
            "duplicates": sum(row.num_duplicates for row in rows),
            "lost": sum(row.num_lost for row in rows),
            "failed_rewards": sum(int(row.metrics.get("num_failed_rewards", 0)) for row in rows),
            "wall_s": round(self.wall_s, 3),
            "timeline": self.timeline,
            "seed": self.seed,
            "weights_checksum": self.job.final_checksum,
            "pace": self.pace and self.pace.record(),
        }

    def write(self, path: Path) -> None:
        """Writes the file atomically."""
        record = {
            "end": self.end,
            "message": self.message,
            "summary": self.summary(),
            "seconds": {str(iteration): seconds for iteration, seconds in sorted(self.seconds.items())},
            "job": MessageToDict(self.job, preserving_proto_field_name=True),
        }
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Reads what `write` wrote. ValueError for any other file."""
        try:
            record = parse_json(path.read_bytes())
            summary = typed(dict, record["summary"], "summary")
            seconds = typed(dict, record["seconds"], "seconds")
            return cls(
                end=End(record["end"]),
                message=typed(str, record["message"], "message"),
                seed=typed(int, summary["seed"], "seed"),
                wall_s=float(summary["wall_s"]),
                job=message_of_json(record["job"], control_pb2.GetJobResponse()),
                timeline=typed(str, summary["timeline"], "timeline"),
                pace=PacedSteps.read(pace) if (pace := summary.get("pace")) else None,
                seconds={int(iteration): float(duration_s) for iteration, duration_s in seconds.items()},
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not the record of a run ({error}): run the job again to write it") from error


def at_rest(report: control_pb2.GetJobResponse) -> control_pb2.GetJobResponse:
    """The scheduler's last report, once all processes are gone: every component is down and holds no GPU."""
    left = control_pb2.GetJobResponse()
    left.CopyFrom(report)
    for component in left.components:
        component.state = "down"
        component.ClearField("grants")
        component.ClearField("layout")
    return left


def without_phase(message: str, phase: str) -> str:
    """Removes the phase from the start of a message, which the scheduler sometimes repeats there."""
    return message.removeprefix(f"{phase}: ")


def role_name(role: int) -> str:
    """The role's name as a person writes it. Empty for no role."""
    name = types_pb2.Role.Name(role).removeprefix("ROLE_").lower()  # type: ignore[arg-type]  # an open enum's value
    return name if name in tuple(Role) else ""
