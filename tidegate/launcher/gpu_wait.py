"""Why a job waits for GPUs, for the output of its run: the scheduler's reason, once a component lacks GPUs for long.

Invariants:
- A short wait, as at a start, is not said. [test_gpu_wait: a_short_wait]
- A reason is said once, and again only when it has changed. [test_gpu_wait: a_reason_is_said_once]
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.launcher.outcome import role_name
from tidegate.v1 import control_pb2

LONG_S = 10.0
"""A wait this long is said, and after it a changed reason. A smaller value says waits of ordinary starts too."""
_PHASES = ("submitted", "starting", "running")


@dataclass(slots=True)
class GpuWait:
    """One job's wait. `now_s` is on one monotonic clock."""

    _since_s: float | None = None
    _said_s: float | None = None
    _reason: str = ""

    def message(self, status: control_pb2.GetJobResponse, *, now_s: float) -> str | None:
        """What to say after this report of the scheduler. None: nothing."""
        lacking = [role_name(each.role) for each in status.components if not each.grants]
        if not lacking or status.phase not in _PHASES:
            self._since_s = self._said_s = None
            self._reason = ""
            return None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        latest_s = since_s if self._said_s is None else self._said_s
        if now_s - latest_s < LONG_S or status.last_reason == self._reason:
            return None
        self._said_s, self._reason = now_s, status.last_reason
        return f"no GPUs for {', '.join(lacking)} since {now_s - since_s:.0f} s: {status.last_reason}"
