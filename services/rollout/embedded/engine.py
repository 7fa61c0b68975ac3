"""The embedded engine: the `Engine` protocol in this process, on one device, in fp32.

A step runs the tokens of newly admitted sequences, and the last token of each sequence that ran before. Then it draws a
token for each. Steps happen only inside `poll`, so a pause, an abort or a weight update is always between two tokens.

Under a pace, a step computes at once and stays open until its modelled end. Its tokens are in the sequences already,
and no other step begins. A poll waits for the end, as long as it may; the next one goes on with it. What the step
finished comes out at its end, or with an abort before.

The invariants hold across processes with the same library builds, kind of device and number of torch threads. A
weight update in place is the exception that the protocol allows, because old keys and values stay.

Invariants:
- A sequence's tokens and log-probabilities depend, to the bit, only on its request and the weights at each token.
  [test_embedded_batch_invariance: batches_of_any_size]
- An abort with a continuation, or a retraction, changes no bit of a response.
  [test_embedded_batch_invariance: leaves_a_trace_in_any_response]
- A pace changes no bit of a response. [test_paced_engine: bits_of_an_unpaced]
- No call waits for the end of an open step, except `poll`. [test_paced_engine: answered_while_a_step_is_open]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from services.rollout.embedded.attention import KvCache
from services.rollout.embedded.batch import Batch, Sequence
from services.rollout.embedded.decoder import Decoder
from services.rollout.embedded.probe import probe_row_counts
from services.rollout.embedded.rows import Segment
from services.rollout.embedded.sampler import Draw, draw_tokens
from services.rollout.embedded.weights import CPU, DecoderWeights, load_weights, tensor_checksum
from services.rollout.engine import (
    EngineFeatures,
    EngineLoad,
    EngineNotReady,
    Generation,
    GenerationRequest,
    PauseMode,
    RequestId,
)
from services.rollout.requests import check_request
from tidegate.model_config import ModelConfig
from tidegate.pace.law import PaceLaw
from tidegate.runtime.pacer import PacedStep, Pacer


class EmbeddedEngine:
    """Starts awake, without weights. Only the wait in `poll` uses `clock`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_running_requests: int = 32,
        device: torch.device = CPU,
        clock: Callable[[], float] = time.monotonic,
        pacer: Pacer | None = None,
    ) -> None:
        """`clock` is the pacer's clock too."""
        row_counts = probe_row_counts(config, device)
        if not 1 <= max_running_requests <= row_counts.largest:
            raise ValueError(
                f"max_running_requests={max_running_requests} must be in [1, {row_counts.largest}], "
                f"the most rows that this machine computes reproducibly"
            )
        self._config = config
        self._device = device
        self._decoder = Decoder(config, row_counts, device)
        self._batch = Batch(num_slots=max_running_requests)
        self._clock = clock
        self._pacer = pacer or Pacer()
        self._open: PacedStep | None = None
        self._cache: KvCache | None = self._decoder.new_cache(max_running_requests)
        self._weights: DecoderWeights | None = None
        self._paused = False

    @property
    def features(self) -> EngineFeatures:
        return EngineFeatures(name="embedded", repeats_draws=True)

    @property
    def server_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._batch.remove(None)
        self._cache = self._weights = None

    def submit(self, request: GenerationRequest) -> None:
        self._ready()
        check_request(request, self._config)
        self._batch.add(request)

    def poll(self, wait_s: float = 0.0) -> tuple[Generation, ...]:
        deadline_s = self._clock() + wait_s
        while len(self._batch) and not self._paused:
            if self._open is None:
                self._open = self._step()
            if not self._pacer.end(self._open, by_s=deadline_s):
                return ()
            self._open = None
            finished = self._take_finished()
            if finished or self._clock() >= deadline_s:
                return finished
        return ()

    def abort(self, ids: Iterable[RequestId] | None = None) -> tuple[Generation, ...]:
        self._interrupt()
        return tuple(self._batch.remove(ids))

    def load(self) -> EngineLoad:
        running = self._batch.running()
        return EngineLoad(
            num_running=len(running),
            num_waiting=len(self._batch) - len(running),
            num_used_tokens=sum(sequence.num_cached for sequence in running),
            num_capacity_tokens=0 if self._cache is None else self._batch.num_slots * self._config.max_seq_len,
        )

    def lengths(self) -> Mapping[RequestId, int]:
        return self._batch.lengths()

    def pause(self, mode: PauseMode) -> tuple[Generation, ...]:
        self._paused = True
        self._interrupt()
        if mode is PauseMode.ABORT:
            return self.abort()
        if mode is PauseMode.RETRACT:
            self._batch.retract()
        return ()

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        if len(self._batch):
            raise EngineNotReady(f"the engine cannot sleep with {len(self._batch)} requests inside: abort them first")
        self._cache = self._weights = None

    def wake(self) -> None:
        if self._cache is None:
            self._cache = self._decoder.new_cache(self._batch.num_slots)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._cache is None:
            raise EngineNotReady(f"the engine sleeps and cannot take weights version {version}: wake it first")
        self._weights = load_weights(self._config, version=version, tensors=tensors, device=self._device)

    @property
    def version(self) -> int | None:
        return None if self._weights is None else self._weights.version

    def checksums(self) -> Mapping[str, str]:
        if self._weights is None:
            return {}
        return {name: tensor_checksum(tensor) for name, tensor in self._weights.named.items()}

    def _ready(self) -> tuple[DecoderWeights, KvCache]:
        if self._cache is None:
            raise EngineNotReady("the engine sleeps: wake it and update its weights first")
        if self._weights is None:
            raise EngineNotReady("the engine has no weights: update them first")
        return self._weights, self._cache

    def _interrupt(self) -> None:
        """The open step is not counted: the engine may be polled long after its end."""
        if self._open is not None:
            self._open.is_counted = False

    def _step(self) -> PacedStep:
        """Make one token of each sequence: new ones run their prompt, the others their last token."""
        weights, cache = self._ready()
        going = self._batch.running()
        new = self._batch.admit()
        segments = [_segment(sequence) for sequence in going]
        prompts = [_segment(sequence) for sequence in new]
        num_prompt_tokens = sum(len(segment.tokens) for segment in prompts)
        num_cached = sum(segment.start for segment in segments)

        def modelled_s(law: PaceLaw) -> float:
            decode_s = law.decode_s(num_sequences=len(going), num_kv_tokens=num_cached) if going else 0.0
            return law.prefill_s(num_prompt_tokens) + decode_s

        step = self._pacer.begin(modelled_s)
        if new:
            for segment in prompts:
                cache.clear(segment.slot)
            self._draw(new, prompts, self._decoder.prefill(weights, cache, prompts), weights.version)
        if going:
            self._draw(going, segments, self._decoder.decode(weights, cache, segments), weights.version)
        return step

    def _draw(
        self, sequences: Collection[Sequence], segments: Collection[Segment], logits_NV: torch.Tensor, version: int
    ) -> None:
        """Draw the next token of each sequence. The logits are those after its segment, which is in the cache now."""
        draws = [Draw(sequence.request.sampling, position=len(sequence.tokens)) for sequence in sequences]
        tokens, log_probs = draw_tokens(logits_NV, draws)
        for sequence, segment, token, log_prob in zip(sequences, segments, tokens, log_probs, strict=True):
            sequence.num_cached += len(segment.tokens)
            sequence.append(token, log_prob=log_prob, version=version)

    def _take_finished(self) -> tuple[Generation, ...]:
        return tuple(self._batch.remove(self._batch.finished()))


def _segment(sequence: Sequence) -> Segment:
    assert sequence.slot is not None, "only sequences in a slot run"
    return Segment(slot=sequence.slot, start=sequence.num_cached, tokens=sequence.uncached_tokens())
