"""One rank of the actor: the model, Megatron's DDP and DistributedOptimizer, and what the updates made with them learn.

Order of an update: the samples cut into micro-batches, each one's loss, and what `tidegate.megatron.updates` does with
them. Invariants: every rank reports the same of an update; the weights of the losses hold the global denominators;
Adam's step count is a tensor of its own for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import TypeAdapter

from services.actor.grpo import SUMS, check_samples, token_weights, update_metrics
from services.actor.grpo_loss import grpo_loss
from services.actor.microbatch import Demonstration, TrainSample, train_batches
from services.actor.settings import OptimizerSettings, TrainerSettings
from tidegate.checksums import WrittenFile
from tidegate.elastic.adam import optimizer_form
from tidegate.elastic.files import StateFiles, write_rank
from tidegate.elastic.holders import State
from tidegate.elastic.memory import OwnArena
from tidegate.elastic.optimizers import DistributedOptimizer, FlatRange, RangesByRank
from tidegate.elastic.skeleton import Skeleton
from tidegate.elastic.world import gather_bytes
from tidegate.megatron.batching import TokenBatch, replica_batches
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.log_probs import forward_log_probs, token_log_probs
from tidegate.megatron.parallel import ParallelRanks
from tidegate.megatron.reproducible import updater, wrapper
from tidegate.megatron.updates import Update

_RANGES = TypeAdapter(dict[str, FlatRange])


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did; the same on every rank."""

    committed: bool
    """False: the loss or the gradient was not finite, and nothing was applied."""
    loss: float
    grad_norm: float
    metrics: dict[str, float]


class MegatronTrainer:
    """Built on every rank of the layout after `parallel.start`; every method is called by all ranks alike."""

    def __init__(self, settings: TrainerSettings, ranks: ParallelRanks, *, device: torch.device) -> None:
        self.settings = settings
        self.ranks = ranks
        self.device = device
        self.provider = GptProvider(settings.model, settings.padded_vocab)
        self.mesh = self.provider.mesh(ranks.layout, tuple(range(ranks.layout.num_ranks)))
        self.me = dist.get_rank()
        self._optimizer_config = _optimizer_config(settings.optimizer)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        num_shards = settings.num_logical_shards
        self.skeleton = Skeleton(
            self.provider,
            self.mesh,
            self.me,
            groups,
            self._optimizer_config,
            device=device,
            arena=OwnArena(device),
            wrapper=wrapper(num_shards),
        )
        self.provider.initialise(self.skeleton.chunks, self.mesh, self.me, seed=settings.seed)
        self.skeleton.start_anew()
        self._updater = updater(
            self.skeleton.chunks, self.skeleton.optimizer, groups, num_sums=len(SUMS), num_logical_shards=num_shards
        )

    def train_minibatch(self, samples: Sequence[TrainSample], learning_rate: float) -> UpdateReport:
        """One GRPO update over a whole minibatch, which every rank is given in full."""
        grpo = self.settings.grpo
        check_samples(samples, grpo)
        batches = train_batches(
            samples,
            token_weights(samples, grpo.aggregation),
            self.settings.limits,
            num_replicas=self.ranks.layout.dp,
            replica=self.ranks.dp,
            num_shards=self.settings.num_logical_shards,
        )

        def on_logits(number: int, tokens_BS: torch.Tensor, logits_BSV: torch.Tensor) -> tuple[torch.Tensor, Any]:
            terms = grpo_loss(self._log_probs(logits_BSV, tokens_BS), batches[number], grpo)
            return terms.loss, terms.sums

        update = self._updater.update([batch.batch for batch in batches], on_logits, learning_rate)
        return _report(update, update_metrics(samples, update.sums))

    def supervised_step(self, demonstrations: Sequence[Demonstration], learning_rate: float) -> UpdateReport:
        """One update on the mean negative log-likelihood of the tokens in the masks, at temperature 1."""
        num_tokens = sum(sum(demonstration.loss_mask[1:]) for demonstration in demonstrations)
        if num_tokens == 0:
            raise ValueError(
                f"{len(demonstrations)} demonstrations have no token to learn after their first: set some mask"
            )
        batches = self._batches([demonstration.tokens for demonstration in demonstrations])

        def on_logits(number: int, tokens_BS: torch.Tensor, logits_BSV: torch.Tensor) -> tuple[torch.Tensor, Any]:
            weight_BS = torch.zeros(tokens_BS.shape, device=self.device)
            for row, index in enumerate(batches[number].sequences):
                loss_mask = demonstrations[index].loss_mask
                weight_BS[row, : len(loss_mask)] = torch.tensor(loss_mask, dtype=torch.float32) / num_tokens
            log_probs_BS = self._log_probs(logits_BSV, tokens_BS, temperature=1.0)
            loss = -(log_probs_BS * weight_BS).sum()
            return loss, torch.stack([loss.detach()] + [torch.zeros_like(loss)] * (len(SUMS) - 1))

        update = self._updater.update(batches, on_logits, learning_rate)
        return _report(update, {"num_tokens": float(num_tokens)})

    def reset_optimizer(self) -> None:
        """Forget Adam's moments: those of one objective say nothing of the next."""
        self.skeleton.reset_moments()

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> dict[int, npt.NDArray[np.float32]]:
        """Log-probabilities of this replica's sequences by their index, on the last stage; {} on other stages."""
        batches = self._batches(sequences)
        rows = forward_log_probs(
            self.skeleton.chunks,
            batches,
            vocab_size=self.settings.model.vocab_size,
            temperature=self.settings.temperature,
            groups=self.ranks.groups,
            device=self.device,
        )
        return {
            index: log_probs_BS[row, : len(sequences[index])]
            for batch, log_probs_BS in zip(batches, rows, strict=bool(rows))
            for row, index in enumerate(batch.sequences)
        }

    def publish(self, folder: Path, file: str) -> WrittenFile | None:
        """Write this rank's share of the weights; None when it has none."""
        return self._write(folder, file, State(self.mesh))

    def save(self, folder: Path, file: str) -> WrittenFile | None:
        """Write this rank's share of all that any layout needs to go on: weights, Adam's moments and steps.

        Nothing is drawn in training, so that no random state is needed.
        """
        return self._write(folder, file, State(self.mesh, self._optimizer({self.me: self.skeleton.ranges()})))

    def load(self, files: StateFiles) -> None:
        """Go on from what `save` wrote in any layout. Raises as `StateFiles.read` does."""
        ranges = _RANGES.dump_json(self.skeleton.ranges())
        world = dist.group.WORLD
        assert world is not None
        gathered = gather_bytes(world, ranges, device=self.device)
        state = State(self.mesh, self._optimizer({rank: _RANGES.validate_json(of) for rank, of in enumerate(gathered)}))
        files.read(parameters=self.provider.parameters(), state=state, me=self.me, targets=self.skeleton.tensors())

    def _write(self, folder: Path, file: str, state: State) -> WrittenFile | None:
        return write_rank(
            folder,
            file,
            parameters=self.provider.parameters(),
            state=state,
            me=self.me,
            tensors=self.skeleton.tensors(),
        )

    def _optimizer(self, ranges: RangesByRank) -> DistributedOptimizer:
        return DistributedOptimizer(ranges, *optimizer_form(self._optimizer_config))

    def _batches(self, sequences: Sequence[Sequence[int]]) -> list[TokenBatch]:
        return replica_batches(
            sequences,
            self.settings.limits,
            num_replicas=self.ranks.layout.dp,
            replica=self.ranks.dp,
            num_shards=self.settings.num_logical_shards,
        )

    def _log_probs(
        self, logits_BSV: torch.Tensor, tokens_BS: torch.Tensor, *, temperature: float | None = None
    ) -> torch.Tensor:
        return token_log_probs(
            logits_BSV,
            tokens_BS,
            vocab_size=self.settings.model.vocab_size,
            temperature=self.settings.temperature if temperature is None else temperature,
            groups=self.ranks.groups,
        )


def _report(update: Update, metrics: dict[str, float]) -> UpdateReport:
    return UpdateReport(update.committed, loss=update.sums[0], grad_norm=update.grad_norm, metrics=metrics)


def _optimizer_config(settings: OptimizerSettings) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_epsilon,
        clip_grad=settings.clip_grad,
        params_dtype=torch.float32,
        use_distributed_optimizer=True,
    )
