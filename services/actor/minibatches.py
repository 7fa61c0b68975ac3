"""Chooses the complete groups that make the next minibatch. Pure.

- `fixed`: a minibatch takes the prompts that follow the one before, in order, up to the group that fills it. Groups may
  join it once all before them are complete.
- `arrival`: a minibatch takes the first complete groups, in order of arrival. All that have come may join.

Groups join the open minibatch, some at a time or all at once. With the one that fills it, it can be closed.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tidegate.candidates import Candidates
from tidegate.types import MinibatchOrder


@dataclass(slots=True)
class MinibatchAssembly:
    """Collects an iteration's complete groups, and puts them into one minibatch after another."""

    candidates: Candidates
    num_minibatches: int
    order: MinibatchOrder
    _waiting: list[int] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    """The prompts of the open minibatch, in the order in which they joined."""
    _num_closed: int = 0
    """The number of prompts in closed minibatches."""

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
        """The number of prompts in minibatches so far. The open minibatch counts."""
        return self._num_closed + len(self._open)

    @property
    def open(self) -> tuple[int, ...]:
        """The prompts of the open minibatch so far."""
        return tuple(self._open)

    @property
    def is_done(self) -> bool:
        return self.candidates.is_complete and not self._waiting and not self._open

    def add(self, prompt: int, *, has_spread: bool) -> None:
        """Add a complete group. Raises ValueError on a prompt of another iteration, or one that was added before."""
        self.candidates.add(prompt, has_spread=has_spread)
        self._waiting.append(prompt)

    @property
    def joining(self) -> tuple[int, ...]:
        """The prompts that may join the open minibatch now, in order, up to the one that fills it."""
        joining: list[int] = []
        num_missing = self._num_missing
        for prompt in self._ordered():
            joining.append(prompt)
            num_missing -= self.candidates.counts(prompt)
            if not num_missing:
                break
        return tuple(joining)

    @property
    def is_filled_by_joining(self) -> bool:
        """Whether the minibatch is full with them, or can get no more."""
        joining = self.joining
        num_counting = sum(map(self.candidates.counts, joining))
        return bool(joining) and (num_counting == self._num_missing or self.candidates.is_complete)

    def join(self, prompts: Sequence[int]) -> None:
        """Put the first of `joining` into the open minibatch."""
        assert tuple(prompts) == self.joining[: len(prompts)], f"{prompts} are not the first of {self.joining}"
        self._waiting = [prompt for prompt in self._waiting if prompt not in prompts]
        self._open += prompts

    def give_back(self) -> None:
        """Let the groups of the open minibatch wait again: what was trained of them is lost."""
        self._waiting[:0] = self._open
        self._open.clear()

    def close(self) -> tuple[int, ...]:
        """End the open minibatch. Returns its prompts."""
        closed = self.open
        self._num_closed += len(closed)
        self._open.clear()
        return closed

    @property
    def _num_missing(self) -> int:
        """The number of groups that the open minibatch still takes, of those that count."""
        return self.prompts_per_minibatch - sum(map(self.candidates.counts, self._open))

    def _ordered(self) -> Iterable[int]:
        """The waiting prompts in the order of the minibatches, up to the first missing one."""
        if self.order is MinibatchOrder.ARRIVAL:
            return self._waiting
        first = self.candidates.first_prompt + self.num_taken
        return takewhile(self._waiting.__contains__, range(first, self.candidates.prompts.stop))
