"""The work of one iteration: its sequences, their groups, and the sizes of its minibatches.

Sequence `i` is a member of group `i // group_size`.

Invariant: the sizes of minibatches differ by at most one group and add up to all groups.
[test_costs: a_split_covers_all_items]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from simulator.cost_model import even_split
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
    """Whether a minibatch starts when its first group has log-probabilities, instead of its last."""
    carries_gradients: bool = False
    """Whether a waiting resize begins between two groups of an open minibatch, which then goes on in the new layout."""
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
        """The number of groups in each minibatch."""
        return even_split(self.num_groups, self.n_minibatches)

    def sequences(self) -> Iterator[Sequence]:
        """New sequences without generated tokens."""
        members = ((group, turns) for group, row in enumerate(self.lengths.turns) for turns in row)
        for index, (group, turns) in enumerate(members):
            yield Sequence(index, group, tuple(accumulate(turns)), self.prompt_tokens)
