"""Which sequences run: continuous batching over a fixed number of slots. Pure: it holds tokens, no tensors.

A sequence enters the lowest free slot in order of submission as soon as one is free and leaves it when it ends, so the
running ones stay close together. Invariants: a sequence is running or waiting, never both; a slot has one sequence;
a sequence in a slot has all its tokens but the last in the cache after each step.
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
    """A request on its way. `num_cached` counts its tokens whose keys and values are in its slot."""

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
        """The tokens to run before the next can be drawn; never empty."""
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
        """None while it could go on."""
        sampling = self.request.sampling
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) == sampling.max_new_tokens else None

    def generation(self) -> Generation:
        response = Response(tuple(self.tokens), tuple(self.log_probs), tuple(self.versions))
        return Generation(self.request.id, response, self.finish_reason() or FinishReason.ABORT)


@dataclass(slots=True)
class Batch:
    """Sequences by id in order of submission; those with a slot run."""

    num_slots: int
    _sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    _free_slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.num_slots))

    def __len__(self) -> int:
        return len(self._sequences)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.slot is not None]

    def lengths(self) -> dict[RequestId, int]:
        return {id_: len(sequence.tokens) for id_, sequence in self._sequences.items()}

    def add(self, request: GenerationRequest) -> None:
        if request.id in self._sequences:
            raise RequestRefused(
                f"request {request.id}: this id is inside the engine already; abort it or take another"
            )
        self._sequences[request.id] = Sequence.begin(request)

    def admit(self) -> list[Sequence]:
        """Give free slots to those that wait longest; the sequences that got one now."""
        if not self._free_slots:
            return []
        admitted = []
        for sequence in self._sequences.values():
            if sequence.slot is None and self._free_slots:
                sequence.slot = heapq.heappop(self._free_slots)
                admitted.append(sequence)
        return admitted

    def remove(self, ids: Iterable[RequestId] | None) -> list[Generation]:
        """Take out sequences as they stand, None for all, in order of submission; UnknownRequest takes out none."""
        wanted = set(self._sequences if ids is None else ids)
        if unknown := sorted(wanted - self._sequences.keys()):
            raise UnknownRequest(
                f"no request {', '.join(unknown)} among the {len(self)} inside the engine; it has come out already or "
                f"was never submitted"
            )
        removed = [sequence for id_, sequence in self._sequences.items() if id_ in wanted]
        for sequence in removed:
            self._leave_slot(sequence)
            del self._sequences[sequence.request.id]
        return [sequence.generation() for sequence in removed]

    def retract(self) -> None:
        """Take every slot back; the sequences wait in their old order."""
        for sequence in self.running():
            self._leave_slot(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot, sequence.num_cached = None, 0
