"""One member of the actor: GRPO and supervised updates of a model that the elastic trainer holds in any layout.

The elastic trainer (`elastic`) has the model, the optimizer, the layout and its changes. This module has the
minibatches that the actor trains on, and the report of an update.

Invariants:
- Every rank of the layout reports the same of an update. [test_worker: has_the_losses_of_a_fixed_one]
- A standby takes no part in an update: it refuses one. [test_worker: impossible_calls_are_refused]
- Under a pace an update lasts as long as that of the busiest replica, with the same bits.
  [test_paced_workers: update_lasts]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from megatron.core.optimizer import OptimizerConfig
from pydantic import JsonValue

from services.actor.grpo import update_metrics
from services.actor.grpo_minibatch import GrpoMinibatch
from services.actor.microbatch import Demonstration, TrainSample
from services.actor.settings import OptimizerSettings, TrainerSettings
from tidegate.elastic.epoch.world import World
from tidegate.elastic.minibatch import Minibatch, NextTokens, RankPlace
from tidegate.elastic.reshard_preparation import OnPoint, ignore_point
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.rng import seed_update
from tidegate.elastic.trainer import ElasticTrainer, NotInLayout
from tidegate.megatron.attention import GatheringAttention
from tidegate.megatron.batching import Limits, replica_batches
from tidegate.megatron.gpt_provider import DTYPES, GptProvider, InitialWeights
from tidegate.megatron.log_probs import forward_log_probs
from tidegate.megatron.lr import group_rates
from tidegate.megatron.packing import Packing, TokenCap
from tidegate.megatron.thd import te_attention
from tidegate.megatron.updates import Update
from tidegate.runtime.pacer import Pacer
from tidegate.types import Layout, Precision


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of an update, the same on every rank."""

    committed: bool
    """False where the loss or the gradient was not finite: then nothing was applied."""
    loss: float
    grad_norm: float
    metrics: dict[str, float]


class MegatronTrainer:
    """Every member of an epoch has one. All ranks of the layout run each update and each forward pass together."""

    def __init__(
        self,
        settings: TrainerSettings,
        world: World,
        *,
        shared_memory: Path | None = None,
        host_memory: Path | None = None,
        weights: InitialWeights | None = None,
        pacer: Pacer | None = None,
        on_point: OnPoint = ignore_point,
    ) -> None:
        """`shared_memory`, `host_memory`: as in ElasticSettings; `weights`: as in GptProvider; `on_point`: as in
        ElasticTrainer.

        `pacer` has the pace of GRPO updates. Supervised steps and forward passes have none."""
        self.settings = settings
        self._pacer = pacer or Pacer()
        self.elastic = ElasticTrainer(
            GptProvider(
                settings.model,
                settings.padded_vocab,
                dtype=DTYPES[settings.precision],
                recompute=settings.recompute,
                weights=weights,
                core_attention=_core_attention(settings.limits),
            ),
            _optimizer_config(settings.optimizer, settings.precision),
            world=world,
            settings=ElasticSettings(
                seed=settings.seed,
                shared_memory=shared_memory,
                host_memory=host_memory,
                copies=settings.copies,
                num_logical_shards=settings.num_logical_shards,
                proves_late=True,
            ),
            on_point=on_point,
        )

    def train_minibatch(
        self,
        samples: Sequence[TrainSample],
        learning_rate: float,
        *,
        bundle_sizes: Sequence[int] = (),
        cursor: Mapping[str, JsonValue] | None = None,
    ) -> UpdateReport:
        """One GRPO update over a whole minibatch, or over the samples that are left of it after `accumulate`.

        Every rank gets all samples. `bundle_sizes`: as in GrpoMinibatch; `cursor`: as in ElasticTrainer. Raises
        ValueError before anything begins, NotInLayout, and PeerLost."""
        minibatch = self._next_portion(samples, bundle_sizes)
        with self._pacer.step(lambda law: law.training_s(minibatch.replica_tokens(self._place()), self._layout)):
            update = self._update(minibatch, learning_rate, cursor)
        scale, importance_cap = minibatch.scale, self.settings.grpo.importance_cap
        metrics = update_metrics(minibatch.all_samples, update.sums, scale=scale, importance_cap=importance_cap)
        metrics |= _filling((*minibatch.portions, minibatch), self._place())
        return _report(update, metrics, scale=scale)

    def accumulate(self, samples: Sequence[TrainSample], *, bundle_sizes: Sequence[int] = ()) -> None:
        """Add the gradients of a portion of the next minibatch. Raises as `train_minibatch`."""
        self._refuse_standby()
        portion = self._next_portion(samples, bundle_sizes)
        with self._pacer.step(lambda law: law.portion_s(portion.replica_tokens(self._place()), self._layout)):
            self.elastic.accumulate(portion)

    @property
    def num_portions(self) -> int:
        """The portions of the next minibatch whose gradients are accumulated."""
        return len(self.elastic.portions)

    def drop_portions(self) -> None:
        self.elastic.drop_portions()

    def portion(
        self, samples: Sequence[TrainSample], bundle_sizes: Sequence[int], *, before: Sequence[GrpoMinibatch]
    ) -> GrpoMinibatch:
        """A portion of a minibatch, after those `before`. Raises ValueError where a sample lacks what the job needs."""
        return GrpoMinibatch(samples, self.settings, bundle_sizes, tuple(before))

    def _next_portion(self, samples: Sequence[TrainSample], bundle_sizes: Sequence[int]) -> GrpoMinibatch:
        before = [portion for portion in self.elastic.portions if isinstance(portion, GrpoMinibatch)]
        return self.portion(samples, bundle_sizes, before=before)

    def supervised_step(self, demonstrations: Sequence[Demonstration], learning_rate: float) -> UpdateReport:
        """One update on the mean negative log-likelihood of the tokens in the masks. Raises as `train_minibatch`."""
        minibatch = NextTokens(
            [demonstration.tokens for demonstration in demonstrations],
            self.settings.model.vocab_size,
            [demonstration.loss_mask for demonstration in demonstrations],
            self.settings.limits,
        )
        return _report(self._update(minibatch, learning_rate), {"num_tokens": float(minibatch.num_tokens)})

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The rates that this rank's optimizer really has, each different rate of its groups once."""
        return group_rates(self.elastic.state.skeleton.optimizer.param_groups)

    def reset_optimizer(self) -> None:
        """Reset Adam's moments: the moments of one objective mean nothing for the next."""
        self.elastic.reset_optimizer()

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> dict[int, npt.NDArray[np.float32]]:
        """Log-probabilities of this replica's sequences by their index, on the last stage; {} on other stages."""
        skeleton, world = self.elastic.state.skeleton, self.elastic.world
        batches = replica_batches(sequences, self.settings.limits, self._place().of_replicas)
        # Attention draws from Megatron's random streams even where dropout is 0.
        seed_update(self.settings.seed, self.elastic.progress.num_updates, skeleton.mesh, world.me)
        rows = forward_log_probs(
            skeleton.chunks,
            batches,
            vocab_size=self.settings.model.vocab_size,
            temperature=self.settings.temperature,
            groups=skeleton.groups,
            device=world.device,
        )
        return {
            index: log_probs_BS[row, : len(sequences[index])]
            for batch, log_probs_BS in zip(batches, rows, strict=bool(rows))
            for row, index in enumerate(batch.sequences)
        }

    @property
    def _layout(self) -> Layout:
        return self.elastic.state.skeleton.mesh.layout

    def _place(self) -> RankPlace:
        skeleton, world = self.elastic.state.skeleton, self.elastic.world
        return RankPlace(skeleton.mesh, world.me, skeleton.groups, world.device, self.settings.num_logical_shards)

    def _update(
        self, minibatch: Minibatch, learning_rate: float, cursor: Mapping[str, JsonValue] | None = None
    ) -> Update:
        self._refuse_standby()
        update = self.elastic.train_minibatch(minibatch, learning_rate, cursor=cursor)
        assert update is not None, "a rank of the layout makes each update"
        return update

    def _refuse_standby(self) -> None:
        if self.elastic.location is None or self.elastic.location.state is None:
            raise NotInLayout(f"member {self.elastic.world.me} stands by: send updates to the ranks of the layout")


def _core_attention(limits: Limits) -> type:
    is_thd = isinstance(limits, TokenCap) and limits.packing is Packing.THD
    return te_attention() if is_thd else GatheringAttention


def _filling(portions: Sequence[GrpoMinibatch], place: RankPlace) -> dict[str, float]:
    """The micro-batches of one replica, and the share of padding in them, over the portions of this layout."""
    places = place.of_replicas
    fillings = [portion.packed(places).filling for portion in portions if portion.ran_at(places)]
    num_batches = float(sum(filling.num_batches for filling in fillings))
    num_positions = float(sum(filling.num_positions for filling in fillings))
    num_padded = sum(filling.padding * filling.num_positions for filling in fillings)
    return {"micro_batches": num_batches, "padding": num_padded / num_positions if num_positions else 0.0}


def _report(update: Update, metrics: dict[str, float], *, scale: float = 1.0) -> UpdateReport:
    return UpdateReport(update.committed, loss=update.sums[0] * scale, grad_norm=update.grad_norm, metrics=metrics)


def _optimizer_config(settings: OptimizerSettings, precision: Precision) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_epsilon,
        clip_grad=settings.clip_grad,
        bf16=precision is Precision.BF16,
        params_dtype=DTYPES[precision],
        use_distributed_optimizer=True,
    )
