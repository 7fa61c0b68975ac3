"""Chooses the complete groups that make the next minibatch. Pure.

- `fixed`: a minibatch takes the prompts that follow the one before, in order, up to the group that fills it. It is
  ready when all these groups are complete.
- `arrival`: a minibatch takes the first complete groups, in order of arrival.

Where the config replaces groups without spread, such groups do not count towards a full minibatch. They go with the
minibatch that is being filled. If too few groups with spread remain, the last minibatch is smaller.

Invariants:
- Each prompt is in exactly one minibatch, without replacement and with it.
  [test_minibatches: every_prompt_is_taken_once]
- All minibatches except the last have the same number of groups that count.
  [test_minibatches: every_candidate_is_in_one_minibatch]
- In `fixed` order, minibatches depend only on which groups have spread, not on when groups arrive.
  [test_minibatches: do_not_depend_on_when_groups_come]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from tidegate.candidates import Candidates
from tidegate.types import MinibatchOrder


@dataclass(slots=True)
class MinibatchAssembly:
    """Collects an iteration's complete groups, and returns them minibatch by minibatch."""

    candidates: Candidates
    num_minibatches: int
    order: MinibatchOrder
    _waiting: list[int] = field(default_factory=list)
    _num_taken: int = 0

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
    def num_taken(self) -> int:
        """The number of prompts in minibatches so far."""
        return self._num_taken

    @property
    def is_done(self) -> bool:
        return self.candidates.is_complete and not self._waiting

    def add(self, prompt: int, *, has_spread: bool) -> None:
        """Add a complete group. Raises ValueError on a prompt of another iteration, or one that was added before."""
        self.candidates.add(prompt, has_spread=has_spread)
        self._waiting.append(prompt)

    def take(self) -> tuple[int, ...] | None:
        """The prompts of the next minibatch. None while one is missing, and after the last minibatch."""
        taken: list[int] = []
        num_missing = self.prompts_per_minibatch
        for prompt in self._ordered():
            taken.append(prompt)
            num_missing -= self.candidates.counts(prompt)
            if not num_missing:
                break
        if not taken or (num_missing and not self.candidates.is_complete):
            return None
        self._waiting = [prompt for prompt in self._waiting if prompt not in taken]
        self._num_taken += len(taken)
        return tuple(taken)

    def _ordered(self) -> Iterable[int]:
        """The waiting prompts in the order of the minibatches, up to the first missing one."""
        if self.order is MinibatchOrder.ARRIVAL:
            return self._waiting
        first = self.candidates.first_prompt + self._num_taken
        return takewhile(self._waiting.__contains__, range(first, self.candidates.prompts.stop))
