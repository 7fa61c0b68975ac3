"""Continuous batching over a fixed number of slots: decides which sequences run. Pure: it holds tokens, no tensors.

Sequences enter the lowest free slots in the order of submission, and leave them when they end. The running sequences
thus stay close together.

Invariants:
- A sequence either runs or waits, and a slot has one sequence. [test_embedded_batch: lowest_free_slots]
- After each step, a sequence in a slot has all its tokens except the last in the cache.
  [test_embedded_batch: then_only_its_last_token]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.rollout.engine import (
    FinishReason,
    Generation,
    GenerationRequest,
    RequestId,
    RequestRefused,
    Response,
    UnknownRequest,
    VersionSpan,
)


@dataclass(slots=True)
class Sequence:
    """A request with its response so far. `num_cached` counts its tokens whose keys and values are in its slot."""

    request: GenerationRequest
    tokens: list[int]
    log_probs: list[float]
    versions: list[VersionSpan]
    num_cached: int = 0
    slot: int | None = None

    @classmethod
    def begin(cls, request: GenerationRequest) -> Sequence:
        partial = request.partial
        return cls(
            request=request,
            tokens=list(partial.tokens),
            log_probs=list(partial.log_probs),
            versions=list(partial.versions),
        )

    def uncached_tokens(self) -> tuple[int, ...]:
        """The tokens to run before the next one can be drawn. Never empty."""
        in_prompt = len(self.request.prompt_tokens)
        if self.num_cached >= in_prompt:
            return tuple(self.tokens[self.num_cached - in_prompt :])
        return self.request.prompt_tokens[self.num_cached :] + tuple(self.tokens)

    def append(self, token: int, *, log_prob: float, version: int) -> None:
        start = end = len(self.tokens)
        if self.versions and self.versions[-1].version == version:
            start = self.versions.pop().start
        self.versions.append(VersionSpan(version=version, start=start, end=end + 1))
        self.tokens.append(token)
        self.log_probs.append(log_prob)

    def finish_reason(self) -> FinishReason | None:
        """The reason of the end. None while the sequence can go on."""
        sampling = self.request.sampling
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) == sampling.max_new_tokens else None

    def generation(self) -> Generation:
        response = Response(tuple(self.tokens), tuple(self.log_probs), tuple(self.versions))
        return Generation(self.request.id, response, self.finish_reason() or FinishReason.ABORT)


@dataclass(slots=True)
class Batch:
    """The sequences by id, in the order of submission. Those with a slot run."""

    num_slots: int
    _sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    _free_slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.num_slots))

    def __len__(self) -> int:
        return len(self._sequences)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.slot is not None]

    def finished(self) -> list[RequestId]:
        """The sequences that have their last token."""
        return [id_ for id_, sequence in self._sequences.items() if sequence.finish_reason() is not None]

    def lengths(self) -> dict[RequestId, int]:
        return {id_: len(sequence.tokens) for id_, sequence in self._sequences.items()}

    def add(self, request: GenerationRequest) -> None:
        if request.id in self._sequences:
            raise RequestRefused(
                f"request {request.id}: this id is inside the engine already; abort it or take another"
            )
        self._sequences[request.id] = Sequence.begin(request)

    def admit(self) -> list[Sequence]:
        """Give free slots to the sequences that waited longest. Returns the sequences that got one."""
        if not self._free_slots:
            return []
        admitted = []
        for sequence in self._sequences.values():
            if sequence.slot is None and self._free_slots:
                sequence.slot = heapq.heappop(self._free_slots)
                admitted.append(sequence)
        return admitted

    def remove(self, ids: Iterable[RequestId] | None) -> list[Generation]:
        """Take out these sequences, or all for None, in order of submission.

        Raises UnknownRequest and takes none out."""
        selected = set(self._sequences if ids is None else ids)
        if unknown := sorted(selected - self._sequences.keys()):
            raise UnknownRequest(
                f"no request {', '.join(unknown)} among the {len(self)} inside the engine; it has come out already or "
                f"was never submitted"
            )
        removed = [sequence for id_, sequence in self._sequences.items() if id_ in selected]
        for sequence in removed:
            self._leave_slot(sequence)
            del self._sequences[sequence.request.id]
        return [sequence.generation() for sequence in removed]

    def retract(self) -> None:
        """Free every slot. The sequences wait in their old order."""
        for sequence in self.running():
            self._leave_slot(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot, sequence.num_cached = None, 0
