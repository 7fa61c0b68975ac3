"""The program that is to take this one's place: how it is started, and whether it can be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tidegate.runtime import handover


@dataclass(frozen=True, slots=True)
class NextProgram:
    """`program`: the words of `tidegate` itself, without a command. `words`: those of the command. `environment`: what
    is to be changed in this process's, as `changed_environment` takes it."""

    program: tuple[str, ...]
    words: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"program": self.program, "words": self.words, "environment": dict(self.environment)})

    @classmethod
    def of(cls, text: str) -> NextProgram:
        """Reads what `to_json` made."""
        fields = json.loads(text)
        return cls(tuple(fields["program"]), tuple(fields["words"]), fields["environment"])

    async def fault(self) -> str:
        """Why it cannot be taken. Empty: it can."""
        return await handover.program_fault(self.program, handover.changed_environment(self.environment))

    def take(self, state: Mapping[str, Any], *, keeps: Iterable[int] = ()) -> NoReturn:
        """As `handover.take_program`."""
        env = handover.changed_environment(self.environment)
        handover.take_program([*self.program, *self.words], state, keeps=keeps, env=env)


NO_PROGRAM = NextProgram((), ())
