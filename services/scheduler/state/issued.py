"""What was issued and is not observed yet, as it is remembered; `expectations` says what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tidegate.types import Role


class Kind(StrEnum):
    """How a command is waited for; see `expectations`."""

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
    """A command that was issued and whose effect is not observed. `key` is its id without the attempt, `what` names it
    to a person; `is_accepted`: a lead took it, and works on it."""

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
