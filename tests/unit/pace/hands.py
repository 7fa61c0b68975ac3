"""A clock that a test moves. A sleep moves it too, so nothing really waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Hands:
    now_s: float = 100.0
    overslept_s: float = 0.0
    """The time by which each sleep is too long."""

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + self.overslept_s
