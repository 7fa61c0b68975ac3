"""Which complete groups make the next minibatch. Pure.

`fixed`: minibatch m is the run of prompts after the one before, up to the group that fills it, and is ready when all of
the run are in. `arrival`: the first complete groups that fill one, in order of arrival. Where groups without spread are
replaced they fill nothing and go with the minibatch that is being filled; should there be too few of the others, what
is left makes a smaller one in the end.
Invariants: each prompt is given out exactly once; all minibatches but the last have equally many groups that count; in
`fixed` order minibatches are a function of which groups have spread, whenever they come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from tidegate.candidates import Candidates
from tidegate.types import MinibatchOrder


@dataclass(slots=True)
class MinibatchAssembly:
    """Collects an iteration's complete groups and gives them out a minibatch at a time."""

    candidates: Candidates
    num_minibatches: int
    order: MinibatchOrder
    _waiting: list[int] = field(default_factory=list)
    _num_given: int = 0

    def __post_init__(self) -> None:
        if self.candidates.num_prompts % self.num_minibatches:
            raise ValueError(
                f"{self.candidates.num_prompts} prompts do not divide into {self.num_minibatches} minibatches; "
                "choose n_minibatches that divides prompts_per_iteration"
            )

    @property
    def prompts_per_minibatch(self) -> int:
        return self.candidates.num_prompts // self.num_minibatches

    @property
    def num_given(self) -> int:
        """Prompts that are in a minibatch."""
        return self._num_given

    @property
    def is_done(self) -> bool:
        return self.candidates.is_complete and not self._waiting

    def add(self, prompt: int, *, has_spread: bool) -> None:
        """A group is complete. ValueError on a prompt that is not of the iteration or was added before."""
        self.candidates.add(prompt, has_spread=has_spread)
        self._waiting.append(prompt)

    def take(self) -> tuple[int, ...] | None:
        """The prompts of the next minibatch; None while they are not all in, or when all were given out."""
        taken: list[int] = []
        num_missing = self.prompts_per_minibatch
        for prompt in self._next():
            taken.append(prompt)
            num_missing -= self.candidates.counts(prompt)
            if not num_missing:
                break
        if not taken or (num_missing and not self.candidates.is_complete):
            return None
        self._waiting = [prompt for prompt in self._waiting if prompt not in taken]
        self._num_given += len(taken)
        return tuple(taken)

    def _next(self) -> Iterable[int]:
        """Those that wait, in the order in which they are to go, up to the first that is not in."""
        if self.order is MinibatchOrder.ARRIVAL:
            return self._waiting
        first = self.candidates.first_prompt + self._num_given
        return takewhile(self._waiting.__contains__, range(first, self.candidates.prompts.stop))
