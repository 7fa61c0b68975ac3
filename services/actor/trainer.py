"""One rank of the actor: the model, Megatron's DDP and DistributedOptimizer, and what the updates made with them learn.

Order of an update: the samples cut into micro-batches, each one's loss, and what `tidegate.megatron.updates` does with
them. Invariants: every rank reports the same of an update; the weights of the losses hold the global denominators;
Adam's step count is a tensor of its own for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from services.actor.grpo import SUMS, check_samples, token_weights, update_metrics
from services.actor.grpo_loss import grpo_loss
from services.actor.microbatch import Demonstration, TrainSample, train_batches
from services.actor.optimizer_state import OptimizerState
from services.actor.settings import OptimizerSettings, TrainerSettings
from tidegate.megatron.batching import TokenBatch, replica_batches
from tidegate.megatron.log_probs import forward_log_probs, token_log_probs
from tidegate.megatron.model import LocalParameter, build_model_chunks, local_parameters
from tidegate.megatron.parallel import ParallelRanks
from tidegate.megatron.reproducible import updater, wrapper
from tidegate.megatron.updates import Update, data_parallel, distributed_optimizer

_RNG = "rng/cpu"


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
        model_chunks = build_model_chunks(
            settings.model,
            ranks.layout,
            ranks.groups,
            padded_vocab=settings.padded_vocab,
            seed=settings.seed,
            device=device,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        num_shards = settings.num_logical_shards
        self.chunks = [data_parallel(chunk, groups, wrapper=wrapper(num_shards)) for chunk in model_chunks]
        optimizer = distributed_optimizer(self.chunks, _optimizer_config(settings.optimizer), groups)
        self._state = OptimizerState(optimizer)
        self._updater = updater(self.chunks, optimizer, groups, num_sums=len(SUMS), num_logical_shards=num_shards)

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
        self._state.start_anew()

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> dict[int, npt.NDArray[np.float32]]:
        """Log-probabilities of this replica's sequences by their index, on the last stage; {} on other stages."""
        batches = self._batches(sequences)
        rows = forward_log_probs(
            self.chunks,
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

    def parameters(self) -> Iterator[LocalParameter]:
        """This rank's parameters under their logical names."""
        return local_parameters(
            self.chunks, self.settings.model, self.ranks.layout, padded_vocab=self.settings.padded_vocab
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """The last update's reduced and clipped gradients by logical name.

        The DistributedOptimizer leaves each replica a range of each: what other replicas hold is NaN here.
        """
        return self._state.gradients(self._named_tensors())

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all this rank needs to go on in the same layout: parameters, Adam's moments and steps, RNG state.

        Parameters are fp32 and are their own main parameters.
        """
        return {name: tensor.clone() for name, tensor in self._own_state().items()} | {_RNG: torch.get_rng_state()}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of `state_tensors`; ValueError, with nothing loaded, when the tensors are of another layout."""
        own = self._own_state()
        if difference := sorted((own.keys() | {_RNG}) ^ tensors.keys()):
            raise ValueError(
                f"checkpoint does not fit this rank of layout {self.ranks.layout}: it has {len(tensors)} tensors, "
                f"{len(own) + 1} are expected, {len(difference)} differ, first {difference[0]!r}; "
                "resume in its own layout"
            )
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise ValueError(
                    f"checkpoint does not fit this rank of layout {self.ranks.layout}: {name!r} has shape "
                    f"{tuple(tensors[name].shape)}, {tuple(tensor.shape)} is expected; resume in its own layout"
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        torch.set_rng_state(tensors[_RNG].cpu())

    def _own_state(self) -> dict[str, torch.Tensor]:
        named = self._named_tensors()
        return {f"param/{name}": tensor.detach() for name, tensor in named.items()} | self._state.tensors(named)

    def _named_tensors(self) -> dict[str, torch.nn.Parameter]:
        return {
            f"{parameter.shard.name}{'/tied' if parameter.tied_copy else ''}": parameter.tensor
            for parameter in self.parameters()
        }

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
