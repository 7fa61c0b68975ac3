"""The minibatch of one update, or a portion of it. Every member gets it whole, and each rank cuts its own part from it.

Invariants:
- The layout does not change the cut into micro-batches, only which replica runs which. The one exception is a token cap
  without logical shards: then the cut follows the number of replicas.
  [test_packing: of_logical_shards_do_not_depend_on_the_number_of_replicas]
- Losses are divided by the denominators of the whole minibatch: by their weights, or by the last portion's scale.
  [test_training_after_switch: updates_after_a_switch_are_those] [test_portions: close_to_a_whole_minibatch]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.elastic.plan.layout import Mesh
from tidegate.megatron.batching import BatchLimits, Limits, ReplicaPlace, TokenBatch, replica_batches
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.schedule import OnLogits


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank, by which it cuts a minibatch."""

    mesh: Mesh
    me: int
    groups: ProcessGroupCollection
    device: torch.device
    num_logical_shards: int | None

    @property
    def of_replicas(self) -> ReplicaPlace:
        """This rank's replica among the others. The cut may depend on nothing else.

        In reproducible mode the cut does not depend on the stages: the schedule adds the micro-batches that interleaved
        stages lack.
        """
        layout = self.mesh.layout
        is_interleaved = layout.vpp > 1 and self.num_logical_shards is None
        return ReplicaPlace(
            replica=self.mesh.coordinates(self.mesh.ranks.index(self.me)).dp,
            num_replicas=layout.dp,
            num_shards=self.num_logical_shards,
            alike=layout.ep > 1,
            multiple=layout.pp if is_interleaved else 1,
        )


class Minibatch(Protocol):
    @property
    def num_samples(self) -> int:
        """The number of samples that count as trained once the update is committed."""

    @property
    def num_sums(self) -> int:
        """The length of the sums that the loss returns for each micro-batch."""

    @property
    def scale(self) -> float:
        """The factor on the gradients of all portions. Only the last portion's counts."""

    def of_rank(self, place: RankPlace) -> tuple[Sequence[TokenBatch], OnLogits]:
        """The rank's micro-batches, and the function of their losses. The first sum of each is the loss itself."""


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The mean negative log-likelihood of the tokens that the masks select, except the first of each sequence.

    Without masks all those tokens count.
    """

    sequences: Sequence[Sequence[int]]
    vocab_size: int
    loss_masks: Sequence[Sequence[bool]] | None = None
    limits: Limits = field(default_factory=BatchLimits)

    def __post_init__(self) -> None:
        if self.num_tokens == 0:
            raise ValueError(f"{len(self.sequences)} sequences have no token to learn after their first: set some mask")

    @property
    def num_samples(self) -> int:
        return len(self.sequences)

    @property
    def num_sums(self) -> int:
        return 1

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the loss."""
        return sum(sum(self._mask(index)[1:]) for index in range(len(self.sequences)))

    def of_rank(self, place: RankPlace) -> tuple[Sequence[TokenBatch], OnLogits]:
        batches = replica_batches(self.sequences, self.limits, place.of_replicas)

        def on_logits(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
            weight_BS = torch.zeros(tokens_BS.shape, device=place.device)
            for row, index in enumerate(batches[number].sequences):
                mask = torch.tensor(self._mask(index), dtype=torch.float32)
                weight_BS[row, : len(mask)] = mask / self.num_tokens
            log_probs_BS = token_log_probs(
                logits_BQV, tokens_BS, vocab_size=self.vocab_size, temperature=1.0, groups=place.groups
            )
            loss = -(log_probs_BS * weight_BS).sum()
            return loss, loss.detach().reshape(1)

        return batches, on_logits

    def _mask(self, index: int) -> Sequence[bool]:
        return self.loss_masks[index] if self.loss_masks is not None else (True,) * len(self.sequences[index])
