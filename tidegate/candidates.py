"""Which prompts an iteration takes when groups that teach nothing are replaced: dynamic sampling. Pure.

Responses to a prompt that are all worth the same have no advantage over each other. With `max_extra_prompts` such a
group is replaced: the candidates of an iteration are its first `num_prompts` prompts, and the next one for each of them
that is found without spread, while there are extra ones left. (DAPO, arXiv 2503.14476, samples whole batches until
enough groups have spread; here nothing is sampled that is not needed.)

Invariants:
- the candidates are a run of prompts from the first, the same whatever the order in which groups come in: the shortest
  that holds `num_prompts` groups with spread, or all that there may be;
- so whoever has seen the same groups knows the same candidates, and nobody has to be told of them;
- without extra prompts the candidates are the first `num_prompts`, and every group counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


def has_spread(rewards: Iterable[float]) -> bool:
    """Whether a group's rewards differ."""
    return len(set(rewards)) > 1


@dataclass(slots=True)
class Candidates:
    """The candidates of one iteration, as far as its groups are seen."""

    first_prompt: int
    num_prompts: int
    max_extra_prompts: int = 0
    _spread: dict[int, bool] = field(default_factory=dict)

    @property
    def prompts(self) -> range:
        """The candidates that are known."""
        replaced = sum(not spread for spread in self._spread.values())
        return range(self.first_prompt, self.first_prompt + self.num_prompts + min(replaced, self.max_extra_prompts))

    @property
    def possible(self) -> range:
        """All that may become candidates."""
        return range(self.first_prompt, self.first_prompt + self.num_prompts + self.max_extra_prompts)

    @property
    def seen(self) -> Mapping[int, bool]:
        """The prompts whose groups are in, and whether each has spread."""
        return self._spread

    @property
    def is_complete(self) -> bool:
        """All candidates are in, and none follows."""
        return all(prompt in self._spread for prompt in self.prompts)

    def add(self, prompt: int, *, has_spread: bool) -> None:
        """A candidate's group is in. ValueError on a prompt that is none of the iteration's or was added before."""
        if prompt not in self.possible:
            raise ValueError(f"prompt {prompt} is not of this iteration ({self.possible[0]}-{self.possible[-1]})")
        if prompt in self._spread:
            raise ValueError(f"prompt {prompt} was added before")
        self._spread[prompt] = has_spread

    def counts(self, prompt: int) -> bool:
        """Whether a group that is in takes one of the `num_prompts` places: one that is to be replaced does not."""
        return self._spread[prompt] or not self.max_extra_prompts
