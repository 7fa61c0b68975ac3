"""What a run's steps say of its pace: whether the real work fitted into the modelled time.

Workers count their steps into the spans of their slots, under the names below. A run is void when more than
`VOID_SHARE` of its steps took more than `TOLERANCE` longer than modelled: its times are then those of this machine.

Invariants:
- A run is void from the first step above the share. [test_steps: void_from_the_first_step]
- Spans without counts change nothing. [test_steps: spans_without_counts]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tidegate.json_text import whole_number

TOLERANCE = 0.1
"""The share of its modelled time by which a step may be late. The wake-up of a waiting process is part of it."""
VOID_SHARE = 0.01
"""The largest share of late steps in a run that counts."""
STEPS, LATE_STEPS, CPU_US = "paced_steps", "late_steps", "cpu_us"
"""The counts in a span's work: steps, those of them that were late, and the CPU time of all, in microseconds."""


@dataclass(frozen=True, slots=True)
class PacedSteps:
    """The steps of a run. `num_cores` is the mean of the cores that their real work took, over the run's time."""

    num_steps: int
    num_late: int
    num_cores: float

    @property
    def late_share(self) -> float:
        return self.num_late / self.num_steps if self.num_steps else 0.0

    @property
    def is_void(self) -> bool:
        return self.num_late > VOID_SHARE * self.num_steps

    def record(self) -> dict[str, Any]:
        """The values for a file or a line of JSON."""
        return asdict(self) | {"num_cores": round(self.num_cores, 3), "is_void": self.is_void}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> PacedSteps:
        """Reads what `record` wrote. KeyError, TypeError or ValueError for anything else."""
        num_steps, num_late = (whole_number(record[name], name) for name in ("num_steps", "num_late"))
        return cls(num_steps, num_late, float(record["num_cores"]))

    def text(self) -> str:
        """One sentence for people, with the remedy where the run is void."""
        counts = (
            f"{self.num_late:,} of {self.num_steps:,} modelled steps ({self.late_share:.2%}) took over {TOLERANCE:.0%} "
            f"longer than modelled, on {self.num_cores:.2f} cores"
        )
        if not self.is_void:
            return f"paced: {counts}"
        return (
            f"VOID: {counts}, and a run with more than {VOID_SHARE:.0%} does not count: raise cluster.pace.time_scale, "
            "give the job fewer slots, or leave the machine to it"
        )


def paced_steps(works: Iterable[Mapping[str, int]], *, wall_s: float) -> PacedSteps:
    """The steps in the work of a run's spans."""
    num_steps = num_late = cpu_us = 0
    for work in works:
        num_steps += work.get(STEPS, 0)
        num_late += work.get(LATE_STEPS, 0)
        cpu_us += work.get(CPU_US, 0)
    return PacedSteps(num_steps, num_late, cpu_us / 1e6 / wall_s if wall_s > 0 else 0.0)
