"""The `Engine` protocol of a generation engine, with the values of its requests and responses.

One protocol serves an engine in this process and one behind HTTP: `submit` never waits for a token, and `poll` returns
the finished responses. One thread drives an engine.

Log-probabilities follow the trainer's convention:
- They are natural logarithms over the full distribution of the temperature-scaled logits.
- They exclude the padding vocabulary, do not apply top_p, and include the stop token's own.
- Greedy decoding (temperature 0) reports them at temperature 1.

Invariants, which `tests/contract/engine_suite.py` checks for every engine:
- Each submitted request comes out exactly once: finished from `poll`, or unfinished from `abort` or `pause(ABORT)`.
- A response that came out can go in again as `GenerationRequest.partial`, to this engine or another. Its tokens keep
  their log-probabilities and versions.
- Every token has the version of the weights that made it.
- A refused call changes nothing.
- After its process died or sent an unreadable answer, an engine raises EngineFailed at every call.
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
    """The reason why a response ends. A response with `abort` could go on."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """The effect of a pause on the requests inside.

    in_place: they stay and keep their KV cache, even over a weight update.
    retract: they stay, and their KV cache is recomputed when generation resumes.
    abort: they come out unfinished.
    """

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class RequestRefused(ValueError):
    """The engine refuses this request. The message names the wrong number and the legal ones."""


class UnknownRequest(LookupError):
    """No request with this id is inside the engine."""


class EngineNotReady(RuntimeError):
    """The engine's state does not allow the call (asleep, without weights, busy)."""


class WeightsRefused(ValueError):
    """The tensors are not a full set for this model. The engine keeps its old weights."""


class EngineFailed(RuntimeError):
    """The engine died, or its state is unknown. The requests inside are lost, and it takes no more calls."""


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """The features of this engine, in this version and on this device, beyond the protocol's minimum.

    repeats_draws: a request's seed decides its draws, whatever other requests are in the batch.
    max_lost_tokens: a request that is aborted in a pause, or while it is retracted, may lose this many last tokens.
    The lost tokens of an abort of all requests are counted in the load, unless it was in a pause.
    """

    name: str
    repeats_draws: bool
    max_lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one request. `temperature` 0 is greedy. `max_new_tokens` includes the tokens of a partial.

    The first stop token ends a response. Without stop tokens, only the length ends it.
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
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 turns it off")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} must be in [0, 2**64)")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weights of `version` made the response tokens [start, end)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Response:
    """Generated tokens, a log-probability for each, and version spans that cover the tokens in order without a gap."""

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
    """A prompt to continue. `partial` is the response that an earlier run of the same request made, in any engine."""

    id: RequestId
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    partial: Response = field(default_factory=Response)


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request. The response begins with the tokens of the request's `partial`."""

    id: RequestId
    response: Response
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load. `num_used_tokens` and `num_capacity_tokens` count tokens of KV cache.

    `num_lost_tokens`: the tokens that it made and that aborts lost, since its start."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    num_capacity_tokens: int
    num_lost_tokens: int = 0


class Generates(Protocol):
    """Takes requests and returns responses."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, which waits during a pause. Raises RequestRefused, or EngineNotReady without weights."""

    def poll(self, wait_s: float = 0.0) -> tuple[Generation, ...]:
        """The generations that finished since the last call.

        If there are none, it waits for up to about `wait_s`, while an engine in this process generates. It returns
        earlier when a request finishes or none can. A call with 0 still makes progress.
        """

    def abort(self, ids: Iterable[RequestId] | None = None) -> tuple[Generation, ...]:
        """Take these requests out, or all for None, in order of submission. A finished one comes out finished.

        Raises UnknownRequest, and takes none out, when an id is not inside.
        """

    def load(self) -> EngineLoad: ...

    def lengths(self) -> Mapping[RequestId, int]:
        """The number of response tokens so far, by request inside, the tokens of its partial included.

        An engine that learns only of finished responses estimates them.
        """


class Pauses(Protocol):
    """Stops generation for a while, or frees the device memory."""

    def pause(self, mode: PauseMode) -> tuple[Generation, ...]:
        """Stop generating before the next token. Returns the aborted requests, none unless `mode` is abort. Idempotent.

        The engine makes no token until the resume, even after an abort. An abort may retract the other requests.
        """

    def resume(self) -> None:
        """Generate again. Does nothing when not paused."""

    def sleep(self) -> None:
        """Free the KV cache and the weights, as far as the engine can on its device, for as long as it stands by.

        Raises EngineNotReady while a request is inside. Idempotent."""

    def wake(self) -> None:
        """Allocate the memory again. The engine has no weights until `update_weights`. Idempotent."""


class HoldsWeights(Protocol):
    """Loads versioned weights, and shows the checksums of its tensors."""

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights between two tokens. Running requests go on as after a pause in place.

        Names and full logical shapes are Megatron's. Raises WeightsRefused, and keeps the old weights. Raises
        EngineNotReady while asleep.
        """

    @property
    def version(self) -> int | None:
        """The version of the weights. None without weights."""

    def checksums(self) -> Mapping[str, str]:
        """The checksum of each tensor by name, computed from the memory that generation reads.

        Empty without weights."""


class Engine(Generates, Pauses, HoldsWeights, Protocol):
    """A generation engine."""

    @property
    def features(self) -> EngineFeatures: ...

    @property
    def server_bytes(self) -> int:
        """The private memory of the processes that run for it beside this one. 0 where there are none."""

    def close(self) -> None:
        """End its processes and free its memory. It takes no calls afterwards. Idempotent."""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine as its start returns it. `memory_bytes` is the resident memory of all processes that run for it."""

    engine: Engine
    memory_bytes: int
