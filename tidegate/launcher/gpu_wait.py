"""Why a job waits for GPUs, for the output of its run: the scheduler's reason, once a component lacks GPUs for long.

Invariants:
- A short wait, as at a start, is not said. [test_gpu_wait: a_short_wait]
- A component whose GPUs a policy gave to others waits for none. [test_gpu_wait: a_policy_gave_to_others]
- A reason is said once, and again when it has changed or holds for one more component.
  [test_gpu_wait: a_reason_is_said_once] [test_gpu_wait: a_second_component_waits]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.launcher.outcome import role_name
from tidegate.v1 import control_pb2

LONG_S = 10.0
"""A wait this long is said, and after it a changed reason. A smaller value says waits of ordinary starts too."""
_PHASES = ("submitted", "starting", "running")


@dataclass(slots=True)
class GpuWait:
    """One job's waits, each component's from its own start. `now_s` is on one monotonic clock."""

    _since_s: dict[str, float] = field(default_factory=dict)
    _last_s: float | None = None
    _last_subject: tuple[str, frozenset[str]] = ("", frozenset())

    def message(self, status: control_pb2.GetJobResponse, *, now_s: float) -> str | None:
        """What to say after this report of the scheduler. None: nothing."""
        waits = status.phase in _PHASES
        lacking = [
            role_name(each.role) for each in status.components if waits and not each.grants and each.state != "lent"
        ]
        self._since_s = {role: self._since_s.get(role, now_s) for role in lacking}
        if not lacking:
            self._last_s, self._last_subject = None, ("", frozenset())
            return None
        long_s = {role: now_s - since_s for role, since_s in self._since_s.items() if now_s - since_s >= LONG_S}
        is_soon = self._last_s is not None and now_s - self._last_s < LONG_S
        reason, roles = self._last_subject
        if not long_s or is_soon or (status.last_reason == reason and long_s.keys() <= roles):
            return None
        self._last_s, self._last_subject = now_s, (status.last_reason, frozenset(long_s))
        waiting = ", ".join(f"{role} since {wait_s:.0f} s" for role, wait_s in long_s.items())
        return f"no GPUs for {waiting}: {status.last_reason}"
