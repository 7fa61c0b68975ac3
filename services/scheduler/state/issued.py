"""How the state remembers a command whose effect is not observed yet. `decide.expectations` has the rules for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tidegate.types import Role


class Kind(StrEnum):
    """How the scheduler waits for a command's effect; see `decide.expectations`."""

    LEAD = "lead"
    OPEN = "open"
    CLOSE = "close"
    EVALUATE = "evaluate"
    HOLD = "hold"
    ORDER = "order"
    STORE = "store"
    GATE = "gate"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Expectation:
    """A command that was issued and whose effect is not observed yet.

    `key` is the command's id without the attempt. `what` is its name for people. `is_accepted`: a lead accepted the
    command and works on it.
    """

    key: str
    kind: Kind
    what: str
    role: Role | None
    epoch: int
    num_issued: int
    num_refused: int
    issued_ms: int
    due_ms: int
    refusal: str
    is_accepted: bool = False
