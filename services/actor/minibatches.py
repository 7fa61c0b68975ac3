"""Which complete groups make the next minibatch. Pure.

`fixed`: minibatch m holds the m-th run of the iteration's prompts, in order, and is ready when all of them are in.
`arrival`: the first complete groups to arrive that make a minibatch, in order of arrival.
Invariants: each prompt is given out exactly once; every minibatch of an iteration has the same number of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.types import MinibatchOrder


@dataclass(slots=True)
class MinibatchAssembly:
    """Collects an iteration's complete groups and gives them out a minibatch at a time."""

    first_prompt: int
    num_prompts: int
    num_minibatches: int
    order: MinibatchOrder
    _added: set[int] = field(default_factory=set)
    _waiting: list[int] = field(default_factory=list)
    _num_given: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts % self.num_minibatches:
            raise ValueError(
                f"{self.num_prompts} prompts do not divide into {self.num_minibatches} minibatches; "
                "choose n_minibatches that divides prompts_per_iteration"
            )

    @property
    def prompts_per_minibatch(self) -> int:
        return self.num_prompts // self.num_minibatches

    @property
    def is_done(self) -> bool:
        return self._num_given == self.num_minibatches

    def add(self, prompt: int) -> None:
        """A group is complete. ValueError on a prompt that is not of the iteration or was added before."""
        if not self.first_prompt <= prompt < self.first_prompt + self.num_prompts:
            last = self.first_prompt + self.num_prompts - 1
            raise ValueError(f"prompt {prompt} is not of this iteration ({self.first_prompt}-{last})")
        if prompt in self._added:
            raise ValueError(f"prompt {prompt} was added before")
        self._added.add(prompt)
        self._waiting.append(prompt)

    def take(self) -> tuple[int, ...] | None:
        """The prompts of the next minibatch; None while they are not all in, or when all were given out."""
        if self.is_done:
            return None
        if self.order is MinibatchOrder.FIXED:
            start = self.first_prompt + self._num_given * self.prompts_per_minibatch
            wanted = tuple(range(start, start + self.prompts_per_minibatch))
        else:
            wanted = tuple(self._waiting[: self.prompts_per_minibatch])
        if len(wanted) < self.prompts_per_minibatch or not set(wanted) <= set(self._waiting):
            return None
        self._waiting = [prompt for prompt in self._waiting if prompt not in wanted]
        self._num_given += 1
        return wanted
