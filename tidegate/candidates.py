"""Which prompts an iteration takes when it replaces groups that teach nothing (dynamic sampling). Pure.

Responses to a prompt that all get the same reward have no advantage over each other. Such a group has no spread.
With `max_extra_prompts` the iteration replaces such groups:
1. The candidates start as the first `num_prompts` prompts.
2. Each group without spread adds the next prompt, as long as extra prompts remain.

DAPO (arXiv 2503.14476) samples whole batches until enough groups have spread. Here no prompt is sampled in vain.

Invariants:
- The candidates are consecutive prompts from the first: the shortest run that holds `num_prompts` groups with spread,
  or all possible prompts. The order in which groups arrive changes nothing.
  [test_candidates: shortest_run_that_holds_enough_groups]
- Without extra prompts the candidates are the first `num_prompts`, and every group counts.
  [test_candidates: without_extra_prompts]

So two processes that have seen the same groups know the same candidates without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


def has_spread(rewards: Iterable[float]) -> bool:
    """Whether a group's rewards differ."""
    return len(set(rewards)) > 1


@dataclass(slots=True)
class Candidates:
    """The candidates of one iteration, as far as its groups have arrived."""

    first_prompt: int
    num_prompts: int
    max_extra_prompts: int = 0
    _spread: dict[int, bool] = field(default_factory=dict)

    @property
    def prompts(self) -> range:
        """The candidates known so far."""
        replaced = sum(not spread for spread in self._spread.values())
        return range(self.first_prompt, self.first_prompt + self.num_prompts + min(replaced, self.max_extra_prompts))

    @property
    def possible(self) -> range:
        """All prompts that may become candidates."""
        return range(self.first_prompt, self.first_prompt + self.num_prompts + self.max_extra_prompts)

    @property
    def seen(self) -> Mapping[int, bool]:
        """Each prompt whose group has arrived, and whether the group has spread."""
        return self._spread

    @property
    def is_complete(self) -> bool:
        """Whether the groups of all candidates have arrived, so that no candidate follows."""
        return all(prompt in self._spread for prompt in self.prompts)

    def add(self, prompt: int, *, has_spread: bool) -> None:
        """Notes the group of a candidate. ValueError for a prompt of another iteration or one that was added before."""
        if prompt not in self.possible:
            raise ValueError(f"prompt {prompt} is not of this iteration ({self.possible[0]}-{self.possible[-1]})")
        if prompt in self._spread:
            raise ValueError(f"prompt {prompt} was added before")
        self._spread[prompt] = has_spread

    def counts(self, prompt: int) -> bool:
        """Whether the group of `prompt`, which has arrived, takes one of the `num_prompts` places.

        A group that is replaced takes none.
        """
        return self._spread[prompt] or not self.max_extra_prompts
