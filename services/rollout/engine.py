"""What the rollout asks of a generation engine: the values that go in and come out, and the `Engine` protocol.

One form serves an engine in this process and one behind HTTP: `submit` never waits for a token, and finished responses
are fetched with `poll`. One thread drives an engine.

Invariants:
- Each submitted request comes out exactly once: finished from `poll`, or as it stands from `abort` or `pause(ABORT)`.
- What comes out can go in again as `GenerationRequest.partial`, to this or another engine; tokens that are there keep
  their log-probability and version.
- Log-probabilities follow the trainer's convention: natural logarithm over the full distribution of the
  temperature-scaled logits, padding vocabulary left out, top_p not applied, the stop token's own included. Greedy
  decoding (temperature 0) reports them at temperature 1.
- Every token carries the version of the weights that made it.
- A refused call changes nothing.
- An engine whose process died, or that answered nonsense, says EngineFailed to every call from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    import torch

RequestId = NewType("RequestId", str)

MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    """Why a response ends where it does; `abort` means that it could go on."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What a pause does with the requests inside.

    in_place: they stay and go on with the KV cache they have, over a weight update too.
    retract: they stay, their KV cache is recomputed when generation resumes.
    abort: they come back as they stand.
    """

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class RequestRefused(ValueError):
    """The engine will not take this request; the message says which number is wrong and what fits."""


class UnknownRequest(LookupError):
    """No such request is inside the engine."""


class EngineNotReady(RuntimeError):
    """The engine's state does not allow the call (asleep, without weights, busy)."""


class WeightsRefused(ValueError):
    """The tensors are not a full set for this model; the engine still holds what it held."""


class EngineFailed(RuntimeError):
    """The engine is gone, or in a state that nobody knows: what was inside is lost, and it takes no more calls."""


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """What this engine, in this version and on this device, does beyond the protocol's least.

    repeats_draws: a request's seed decides its draws, whatever the batch around it.
    num_untold_tokens: a request that is aborted in a pause, or while it waits retracted, may lose as many of its last.
    """

    name: str
    repeats_draws: bool
    num_untold_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. `max_new_tokens` counts the tokens of a continued partial too.

    Whichever stop token comes first ends a response; without any, none does.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 leaves it off")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} must be in [0, 2**64)")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were made by weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Response:
    """Generated tokens with a log-probability each, and versions as spans that cover them in order without a gap."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        if len(self.log_probs) != len(self.tokens):
            raise ValueError(f"a response of {len(self.tokens)} tokens has {len(self.log_probs)} log-probabilities")
        end = 0
        for span in self.versions:
            if span.start != end or span.end <= span.start:
                raise ValueError(f"version span [{span.start}, {span.end}) must start at {end} and hold a token")
            end = span.end
        if end != len(self.tokens):
            raise ValueError(f"version spans cover {end} of {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`partial` holds what an earlier run of the same request, here or elsewhere, had made."""

    id: RequestId
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    partial: Response = field(default_factory=Response)


@dataclass(frozen=True, slots=True)
class Generation:
    """A request's outcome; the response begins with the tokens of the request's `partial`."""

    id: RequestId
    response: Response
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full an engine is: used and capacity count tokens of KV cache."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    num_capacity_tokens: int


class Generates(Protocol):
    """Takes requests and gives responses."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; in a pause it waits. Raises RequestRefused, or EngineNotReady without weights."""

    def poll(self, wait_s: float = 0.0) -> tuple[Generation, ...]:
        """What has finished since the last call.

        With nothing finished it waits, and an engine in this process generates, for up to about `wait_s`. It returns
        earlier when something finishes or nothing can. Calls with 0 still make progress.
        """

    def abort(self, ids: Iterable[RequestId] | None = None) -> tuple[Generation, ...]:
        """Take these requests out, None for all, in order of submission; one that had finished comes out finished.

        Raises UnknownRequest, with nothing taken out, when an id is not inside.
        """

    def load(self) -> EngineLoad: ...

    def lengths(self) -> Mapping[RequestId, int]:
        """Response tokens so far of each request inside, those of its partial included.

        An engine that is told of finished responses only estimates them.
        """


class Pauses(Protocol):
    """Holds generation still, or gives the device memory back."""

    def pause(self, mode: PauseMode) -> tuple[Generation, ...]:
        """Stop generating before the next token; idempotent. The requests taken out: empty unless mode is abort.

        Until the resume no token is made, whatever is aborted; an abort may retract what it leaves inside.
        """

    def resume(self) -> None:
        """Generate again; nothing happens when not paused."""

    def sleep(self) -> None:
        """Free the KV cache and the weights; idempotent. Raises EngineNotReady while a request is inside."""

    def wake(self) -> None:
        """Take the memory again; idempotent. The engine is without weights until `update_weights`."""


class HoldsWeights(Protocol):
    """Loads versioned weights and can show what it holds."""

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, between two tokens; what runs goes on as after a pause in place.

        Names and full logical shapes are Megatron's. Raises WeightsRefused (the old weights stay), or EngineNotReady
        while asleep.
        """

    @property
    def version(self) -> int | None:
        """Of the weights held; None without weights."""

    def checksums(self) -> Mapping[str, str]:
        """Of each tensor held, by name, computed from the memory that generation reads; empty without weights."""


class Engine(Generates, Pauses, HoldsWeights, Protocol):
    """A generation engine."""

    @property
    def features(self) -> EngineFeatures: ...

    def close(self) -> None:
        """End its processes and free its memory; idempotent. It takes no calls after."""
