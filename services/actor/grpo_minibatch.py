"""The minibatch of one GRPO update: all its samples, from which each rank takes those of its place in the layout.

Invariant: the weights of the losses include the global denominators, whichever rank runs a micro-batch.
[test_token_cap: gradients_do_not_depend]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from services.actor.grpo import SUMS, check_samples, token_weights
from services.actor.grpo_loss import grpo_loss
from services.actor.microbatch import TrainBatch, TrainSample, packed_samples, train_batches
from services.actor.settings import TrainerSettings
from tidegate.elastic.minibatch import RankPlace
from tidegate.megatron.batching import MicroBatchPlan, ReplicaPlace, TokenBatch
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.schedule import OnLogits


@dataclass(frozen=True, slots=True)
class GrpoMinibatch:
    """The constructor raises ValueError when a sample lacks what the settings need."""

    samples: Sequence[TrainSample]
    settings: TrainerSettings
    _packed: dict[ReplicaPlace, MicroBatchPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_samples(self.samples, self.settings.grpo)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def num_sums(self) -> int:
        return len(SUMS)

    def packed(self, place: ReplicaPlace) -> MicroBatchPlan:
        """The packing of the samples into micro-batches, computed once per place. Raises SampleOverCap."""
        if place not in self._packed:
            self._packed[place] = packed_samples(self.samples, self.settings.limits, place)
        return self._packed[place]

    def micro_batches(self, place: ReplicaPlace) -> list[TrainBatch]:
        return train_batches(self.samples, token_weights(self.samples, self.settings.grpo), self.packed(place))

    def replica_tokens(self, place: RankPlace) -> list[list[int]]:
        """The tokens of each micro-batch without padding, by replica."""
        return self.packed(place.of_replicas).replica_tokens()

    def of_rank(self, place: RankPlace) -> tuple[Sequence[TokenBatch], OnLogits]:
        settings = self.settings
        batches = self.micro_batches(place.of_replicas)

        def on_logits(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
            log_probs_BS = token_log_probs(
                logits_BQV,
                tokens_BS,
                vocab_size=settings.model.vocab_size,
                temperature=settings.temperature,
                groups=place.groups,
            )
            terms = grpo_loss(log_probs_BS, batches[number], settings.grpo)
            return terms.loss, terms.sums

        return [batch.batch for batch in batches], on_logits
