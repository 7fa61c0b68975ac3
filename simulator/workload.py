"""What one iteration has to do: its sequences, their groups, and how the groups become minibatches.

Invariant: sequence `i` is a member of group `i // group_size`; the minibatches' sizes differ by one group at most and
add up to all groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from simulator.costs import even_split
from simulator.engines import Sequence
from simulator.lengths import Lengths
from tidegate.types import MinibatchOrder


@dataclass(frozen=True, slots=True)
class Workload:
    lengths: Lengths
    n_minibatches: int
    prompt_tokens: int
    minibatch_order: MinibatchOrder = MinibatchOrder.ARRIVAL
    streams: bool = True
    """A minibatch starts with its first group that has its log-probabilities, not with its last."""
    observation_tokens: int = 0
    environment_s: float = 0.0

    @property
    def num_groups(self) -> int:
        return len(self.lengths.turns)

    @property
    def group_size(self) -> int:
        return len(self.lengths.turns[0])

    @property
    def minibatch_sizes(self) -> tuple[int, ...]:
        """In groups."""
        return even_split(self.num_groups, self.n_minibatches)

    def sequences(self) -> Iterator[Sequence]:
        """New ones, nothing generated."""
        members = ((group, turns) for group, row in enumerate(self.lengths.turns) for turns in row)
        for index, (group, turns) in enumerate(members):
            yield Sequence(index, group, tuple(accumulate(turns)), self.prompt_tokens)
