"""One rank of the inference: log-probabilities under the current and the reference policy, of groups or parts of them.

A micro-batch holds samples of one group, so a sample's bits depend only on what came of its own group, not on other
groups that arrived with it. Samples of a group that came apart have the same log-probabilities within rounding.
Weights come only from verified snapshots.

Invariants:
- A sample's bits do not depend on other groups. [test_scorer: bits_do_not_depend_on_the_groups]
- A response that is scored apart from its group differs by rounding alone. [test_scorer: scored_apart_from_its_group]
- In the actor's layout and padding, the log-probabilities have the bits of the actor's own forward pass, which runs the
  same code. [test_scorer: are_the_actors_to_the_bit]
- After a rest, a scorer that has loaded weights again gives the same bits. [test_standby: same_bits_after_a_rest]
- Under a pace a scoring lasts as long as that of the busiest replica, with the same bits.
  [test_paced_workers: scoring_lasts]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.state.files import StateFiles
from tidegate.megatron.batching import BatchLimits, TokenBatch, cut, deal, pad
from tidegate.megatron.gpt_chunks import drop_cached_positions
from tidegate.megatron.gpt_provider import DTYPES, GptProvider
from tidegate.megatron.log_probs import forward_log_probs
from tidegate.megatron.parallel import ParallelRanks
from tidegate.model_config import ModelConfig
from tidegate.runtime.pacer import Pacer
from tidegate.types import Precision

LogProbs = dict[tuple[int, int], npt.NDArray[np.float32]]
"""By (group, sample), as numbered in the call: one value per token of the sequence, 0 for its first."""


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """The settings of a scorer, the same on every rank."""

    model: ModelConfig
    padded_vocab: int
    temperature: float
    limits: BatchLimits
    precision: Precision = Precision.FP32


@dataclass(slots=True)
class _Policy:
    """The model of one policy. `version`: None while it has no weights."""

    chunks: Sequence[torch.nn.Module]
    version: int | None = None

    def release(self) -> None:
        """Free the memory of the weights. The modules keep their shapes and groups."""
        self.version = None
        for storage, _ in self._storages():
            storage.resize_(0)

    def restore(self) -> None:
        """Have memory for the weights, all 0, as the vocabulary's padding is, which no snapshot has."""
        for storage, size_bytes in self._storages():
            if not storage.nbytes():
                storage.resize_(size_bytes)
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.zero_()

    def _storages(self) -> Iterator[tuple[torch.UntypedStorage, int]]:
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                yield parameter.untyped_storage(), parameter.numel() * parameter.element_size()


@dataclass(slots=True)
class MegatronScorer:
    """Every rank builds one after `parallel.start`. All ranks call each method together."""

    settings: ScorerSettings
    ranks: ParallelRanks
    device: torch.device
    pacer: Pacer = field(default_factory=Pacer)
    _provider: GptProvider = field(init=False)
    _mesh: Mesh = field(init=False)
    _policy: _Policy | None = field(default=None, init=False)
    _reference: _Policy | None = field(default=None, init=False)
    """Each is None before it is built."""

    def __post_init__(self) -> None:
        self._provider = GptProvider(
            self.settings.model, self.settings.padded_vocab, dtype=DTYPES[self.settings.precision]
        )
        self._mesh = self._provider.mesh(self.ranks.layout, tuple(range(self.ranks.layout.num_ranks)))

    def load(self, files: StateFiles, *, version: int, reference: bool) -> None:
        """Load a version's weights, as the policy or as the reference. Raises as `StateFiles.read`."""
        held = (self._reference if reference else self._policy) or self._build()
        if held.version is None:
            held.restore()
        me = dist.get_rank()
        targets = {
            (name, StateKind.WEIGHT): tensor.detach().view(-1)
            for name, tensor in self._provider.local_parameters(held.chunks, self._mesh, me)
        }
        files.read(parameters=self._provider.parameters(), state=State(self._mesh), me=me, targets=targets)
        held.version = version
        if reference:
            self._reference = held
        else:
            self._policy = held

    def rest(self) -> None:
        """Build the policy's model, if there is none, and free the memory of all weights. `load` brings them back."""
        self._policy = self._policy or self._build()
        for each in (self._policy, self._reference):
            if each is not None:
                each.release()
        drop_cached_positions()

    @property
    def version(self) -> int | None:
        """The version of the policy's weights. None before the first."""
        return self._policy.version if self._policy else None

    @property
    def has_reference(self) -> bool:
        return self._reference is not None and self._reference.version is not None

    def policy_log_probs(self, groups: Sequence[Sequence[Sequence[int]]]) -> LogProbs:
        """The log-probabilities of this replica's sequences, on its last stage; {} on other stages.

        A sequence is a prompt and its response. Raises ValueError before any weights are loaded.
        """
        return self._log_probs(self._policy, groups, "policy")

    def reference_log_probs(self, groups: Sequence[Sequence[Sequence[int]]]) -> LogProbs:
        """The same as `policy_log_probs`, under the reference policy."""
        return self._log_probs(self._reference, groups, "reference")

    def _build(self) -> _Policy:
        chunks = self._provider.build(self._mesh, dist.get_rank(), self.ranks.groups, device=self.device)
        # Do not freeze the weights, though nothing here computes gradients: Megatron takes another path for weights
        # without gradients, with other bits than the actor's (seen in tp2 for a batch of one sequence).
        return _Policy([chunk.eval() for chunk in chunks])

    def _log_probs(self, policy: _Policy | None, groups: Sequence[Sequence[Sequence[int]]], which: str) -> LogProbs:
        if policy is None or policy.version is None:
            raise ValueError(f"the inference has no {which} weights; load a version first")
        rows: list[tuple[int, tuple[int, ...]]] = []
        for number, sequences in enumerate(groups):
            lengths = [len(sequence) for sequence in sequences]
            rows.extend((number, batch) for batch in cut(lengths, self.settings.limits))
        shares = deal([(row,) for row in range(len(rows))], num_replicas=self.ranks.layout.dp, replica=self.ranks.dp)
        own = [rows[row[0]] if row else (0, ()) for row in shares]
        batches: list[TokenBatch] = [pad(groups[number], batch, self.settings.limits) for number, batch in own]
        layout = self.ranks.layout
        num_tokens = max(_num_tokens(groups, rows[replica :: layout.dp]) for replica in range(layout.dp))
        with self.pacer.step(lambda law: law.scoring_s(num_tokens, layout)), torch.no_grad():
            scored = forward_log_probs(
                policy.chunks,
                batches,
                vocab_size=self.settings.model.vocab_size,
                temperature=self.settings.temperature,
                groups=self.ranks.groups,
                device=self.device,
            )
        return {
            (number, sample): log_probs_BS[row, : len(groups[number][sample])]
            for (number, batch), log_probs_BS in zip(own, scored, strict=bool(scored))
            for row, sample in enumerate(batch)
        }


def _num_tokens(groups: Sequence[Sequence[Sequence[int]]], rows: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    """The tokens without padding of some micro-batches: each a group and its sequences."""
    return sum(len(groups[number][sample]) for number, batch in rows for sample in batch)
