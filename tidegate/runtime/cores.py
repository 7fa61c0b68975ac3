"""The CPU cores that this process may use: those of its affinity, at most its control group's quota."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_cores(cgroup: Path = CGROUP) -> float:
    """`cgroup`: the folder of the control group, version 2. Without a quota there, the affinity alone counts."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        # No such file, or "max" in place of a number: there is no quota.
        return cores
