"""A policy with a record of its decisions."""

from __future__ import annotations

from services.scheduler.policy import Policy
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import JobSpec
from simulator.outcome import PolicyDecision


class WatchedPolicy:
    """Chooses as the policy does. `decisions` has the choices that changed the assignment."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: Choice | None = None
        self._assignment: Assignment | None = None
        self.decisions: list[PolicyDecision] = []

    def begin(self) -> None:
        """An iteration begins: no decision is made in it."""
        self._last, self._assignment, self.decisions = None, None, []

    def check(self, spec: JobSpec) -> None:
        self._policy.check(spec)

    def choose(self, situation: Situation) -> Choice:
        self._last = self._policy.choose(situation)
        return self._last

    def note(self, at_s: float) -> None:
        """Record the last choice as a decision at `at_s`, if it changed the assignment."""
        choice, self._last = self._last, None
        if choice is not None and choice.assignment != self._assignment:
            self._assignment = choice.assignment
            ends_s = choice.ends_at_ms / 1000 if choice.ends_at_ms is not None else None
            self.decisions.append(PolicyDecision(at_s, choice.reason, choice.assignment, ends_s))
