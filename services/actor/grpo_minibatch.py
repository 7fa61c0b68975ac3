"""The minibatch of one GRPO update, or a portion of it, from which each rank takes the samples of its place.

Invariant: weights and scale are those of the whole minibatch, whichever rank runs a micro-batch and in whichever
portion. [test_token_cap: gradients_do_not_depend]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from services.actor.grpo import SUMS, check_samples, minibatch_scale, token_weights
from services.actor.grpo_loss import grpo_loss
from services.actor.microbatch import TrainBatch, TrainSample, packed_samples, train_batches
from services.actor.settings import TrainerSettings
from tidegate.elastic.minibatch import RankPlace
from tidegate.megatron.batching import MicroBatchPlan, ReplicaPlace, TokenBatch
from tidegate.megatron.bundles import plan_bundles
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.schedule import OnLogits


@dataclass(frozen=True, slots=True)
class GrpoMinibatch:
    """The constructor raises ValueError when a sample lacks what the settings need."""

    samples: Sequence[TrainSample]
    settings: TrainerSettings
    bundle_sizes: Sequence[int] = ()
    """The samples of each bundle, for reproducible mode. Empty: the samples are packed as a whole."""
    portions: Sequence[GrpoMinibatch] = ()
    """The portions of the minibatch before this one."""
    _packed: dict[ReplicaPlace, MicroBatchPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_samples(self.samples, self.settings.grpo)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def num_sums(self) -> int:
        return len(SUMS)

    @property
    def all_samples(self) -> list[TrainSample]:
        """The minibatch's samples up to the end of this portion."""
        return [sample for portion in (*self.portions, self) for sample in portion.samples]

    @property
    def scale(self) -> float:
        return minibatch_scale(self.all_samples, self.settings.grpo)

    def packed(self, place: ReplicaPlace) -> MicroBatchPlan:
        """The packing of the samples into micro-batches, computed once per place. Raises SampleOverCap."""
        if place not in self._packed:
            self._packed[place] = self._pack(place)
        return self._packed[place]

    def ran_at(self, place: ReplicaPlace) -> bool:
        """Whether it ran here in these places. A carried portion ran elsewhere."""
        return place in self._packed

    def _pack(self, place: ReplicaPlace) -> MicroBatchPlan:
        limits = self.settings.limits
        if place.num_shards is None or not self.bundle_sizes:
            return packed_samples(self.samples, limits, place)
        lengths = [len(sample.tokens) for sample in self.samples]
        first_bundle = sum(len(portion.bundle_sizes) for portion in self.portions)
        return plan_bundles(lengths, self.bundle_sizes, limits, place, first_bundle=first_bundle)

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
