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
from simulator.lengths import Lengths, Turns
from tidegate.megatron.batching import Limits
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
    scores_ahead: bool = False
    """Whether the inference computes responses before their group has ended."""
    limits: Limits | None = None
    """The limits of the trainer's micro-batches. None: an ideal trainer (`simulator.portions`)."""
    num_logical_shards: int | None = None
    """As `actor.num_logical_shards` of a job."""
    response_share: float = 1.0
    """The share of responses in all tokens, as earlier iterations have measured it."""
    observation_tokens: int = 0
    environment_s: float = 0.0
    filtered: frozenset[int] = frozenset()
    """The groups without a spread of rewards. They are generated, and neither scored nor trained."""

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

    def num_tokens(self, turns: Turns) -> int:
        """The tokens of a sequence with these turns: those that the inference scores and the trainer trains."""
        return self.prompt_tokens + sum(turns) + (len(turns) - 1) * self.observation_tokens

    def sequence_tokens(self, group: int) -> tuple[int, ...]:
        """The tokens of each sequence of the group, as `num_tokens`."""
        return tuple(map(self.num_tokens, self.lengths.turns[group]))

    def sequences(self) -> Iterator[Sequence]:
        """New sequences without generated tokens."""
        members = ((group, turns) for group, row in enumerate(self.lengths.turns) for turns in row)
        for index, (group, turns) in enumerate(members):
            yield Sequence(index, group, tuple(accumulate(turns)), self.prompt_tokens)
