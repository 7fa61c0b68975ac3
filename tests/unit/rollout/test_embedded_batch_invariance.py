"""A sequence has the same bits in any batch, at any interruption, and in any engine that continues it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.embedded.decoder import Decoder, RowCounts
from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.embedded.probe import REFERENCE_ROWS, probe_row_counts
from services.rollout.embedded.rows import Segment
from services.rollout.embedded.weights import load_weights
from services.rollout.engine import (
    Generation,
    GenerationRequest,
    PauseMode,
    RequestId,
    Response,
    SamplingParams,
)
from tests import effort
from tests.unit.rollout.tiny_models import TINY, engine_of, finish, random_weights, request_of, run
from tidegate.model_config import Llama3Scaling, ModelConfig

SHAPES = {
    "head_dim 16, two KV groups": TINY,
    "odd widths": replace(TINY, hidden_size=50, ffn_hidden_size=77, head_dim=24, num_heads=3, num_kv_heads=3),
    "wide": replace(TINY, num_layers=1, hidden_size=128, ffn_hidden_size=344, num_heads=8, head_dim=32),
    "biases, norms of heads, another RoPE, experts": replace(
        TINY,
        qkv_bias=True,
        qk_norm=True,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
        num_experts=5,
        experts_per_token=2,
    ),
}


def mixed_requests(most_new_tokens: int = 70) -> list[GenerationRequest]:
    """Requests with prompts of 1 to 90 tokens and responses that end at different times, across block edges."""
    return [
        request_of(
            f"r{index}",
            prompt=[(3 * index + 5 * position) % TINY.vocab_size for position in range(1 + (index * 13) % 90)],
            sampling=SamplingParams(
                max_new_tokens=min(5 + (index * 17) % 65, most_new_tokens),
                temperature=(0.0, 0.7, 1.0, 1.3)[index % 4],
                top_p=0.9 if index % 3 == 0 else 1.0,
                seed=index,
            ),
        )
        for index in range(11)
    ]


def alone(config: ModelConfig, request: GenerationRequest) -> Generation:
    return run(engine_of(config, max_running_requests=1), request)[request.id]


@pytest.mark.parametrize("shape", effort.cases(SHAPES, always=["head_dim 16, two KV groups"]))
def test_a_sequence_is_the_same_alone_and_in_batches_of_any_size_and_order(shape: str) -> None:
    config, requests = SHAPES[shape], mixed_requests()
    want = {request.id: alone(config, request) for request in requests}
    for max_running_requests in (3, 32):
        assert run(engine_of(config, max_running_requests=max_running_requests), *requests) == want
    assert run(engine_of(config, max_running_requests=4), *reversed(requests)) == want


@pytest.mark.parametrize("shape", effort.cases(SHAPES, always=["odd widths"]))
def test_prefill_and_decode_of_any_split_give_the_same_logits_and_cache(shape: str) -> None:
    config = SHAPES[shape]
    decoder = Decoder(config, probe_row_counts(config))
    weights = load_weights(config, version=1, tensors=random_weights(config))
    tokens = tuple((11 * position) % config.vocab_size for position in range(140))

    def outcome(split: int, *, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = decoder.new_cache(num_slots=4)
        logits = decoder.prefill(weights, cache, [Segment(slot=slot, start=0, tokens=tokens[:split])])
        for position in range(split, len(tokens)):
            logits = decoder.decode(
                weights, cache, [Segment(slot=slot, start=position, tokens=tokens[position : position + 1])]
            )
        return logits[0], torch.stack((cache.keys[:, slot], cache.values[:, slot]))

    want_logits, want_cache = outcome(len(tokens), slot=0)
    for split, slot in ((1, 0), (2, 3), (63, 1), (64, 2), (65, 3), (139, 2)):
        logits, cache = outcome(split, slot=slot)
        assert torch.equal(logits, want_logits), f"logits after a prefill of {split}"
        assert torch.equal(cache, want_cache), f"cache after a prefill of {split}"


def test_a_machine_that_computes_only_many_rows_alike_decodes_with_few_slots() -> None:
    config = SHAPES["wide"]
    decoder = Decoder(config, RowCounts((REFERENCE_ROWS,)))
    weights = load_weights(config, version=1, tensors=random_weights(config))
    cache = decoder.new_cache(num_slots=1)
    want = decoder.prefill(weights, cache, [Segment(slot=0, start=0, tokens=(3, 1, 4))])
    cache.clear(0)
    decoder.prefill(weights, cache, [Segment(slot=0, start=0, tokens=(3, 1))])
    assert torch.equal(decoder.decode(weights, cache, [Segment(slot=0, start=2, tokens=(4,))]), want)


def test_a_device_that_multiplies_other_numbers_of_rows_otherwise_computes_attention_in_batches_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200 does so with heads of 128. No number of requests, no split and no neighbour changes a bit then."""
    plain = torch.bmm

    def bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        half = a.shape[-1] // 2 if len(a) % 64 else a.shape[-1]
        product = plain(a[..., :half], b[:, :half]) + plain(a[..., half:], b[:, half:])
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(torch, "bmm", bmm)
    assert probe_row_counts(TINY).attention_batch == 64
    requests = mixed_requests(most_new_tokens=20)
    want = {request.id: alone(TINY, request) for request in requests}
    for max_running_requests in (3, 64):
        assert run(engine_of(max_running_requests=max_running_requests), *reversed(requests)) == want


def test_a_prefill_longer_than_the_largest_row_count_is_cut_without_a_trace() -> None:
    config = replace(TINY, max_seq_len=400)
    prompt = [(5 * position) % config.vocab_size for position in range(300)]
    request = request_of(prompt=prompt, sampling=SamplingParams(max_new_tokens=20, seed=1))
    others = [request_of(f"r{index}", prompt=prompt[: 60 + index]) for index in range(4)]
    in_batch = run(engine_of(config), *others, request)["a"]
    (half,) = stopped_after(engine_of(config), request, num_steps=10)
    continued = run(engine_of(config), replace(request, partial=half.response))["a"]
    assert in_batch == continued == alone(config, request)


@pytest.mark.parametrize("temperature", effort.cases([0.0, 1.0], always=[1.0]), ids=["greedy", "seeded"])
def test_a_sequence_that_moves_at_any_token_is_the_one_that_never_moved(temperature: float) -> None:
    """It moves once before its first token, once after, and so on, and meets other sequences on the other engine."""
    request = request_of(sampling=SamplingParams(max_new_tokens=24, temperature=temperature, seed=5))
    here, elsewhere = engine_of(max_running_requests=1), engine_of(max_running_requests=6)
    want = alone(TINY, request)
    for num_steps in range(24):
        (partial,) = stopped_after(here, request, num_steps=num_steps)
        assert len(partial.response.tokens) == num_steps
        others = mixed_requests(most_new_tokens=24 - num_steps)[num_steps % 5 :][:4]
        continued = run(elsewhere, *others, replace(request, partial=partial.response))["a"]
        assert continued == want, f"moved after {num_steps} tokens"


def test_a_sequence_that_moves_after_every_token_is_the_one_that_never_moved() -> None:
    request = request_of(sampling=SamplingParams(max_new_tokens=24, seed=5))
    engines = engine_of(max_running_requests=1), engine_of(max_running_requests=3)
    partial = Response()
    for num_steps in range(23):
        (moved,) = stopped_after(engines[num_steps % 2], replace(request, partial=partial), num_steps=1)
        partial = moved.response
    assert run(engines[1], replace(request, partial=partial))["a"] == alone(TINY, request)


@pytest.mark.parametrize("num_steps", effort.cases([20, 58, 59], always=[59]))
def test_a_sequence_aborted_and_continued_on_another_engine_is_the_one_that_was_never_interrupted(
    num_steps: int,
) -> None:
    request = request_of(sampling=SamplingParams(max_new_tokens=60, seed=5))
    (partial,) = stopped_after(engine_of(max_running_requests=1), request, num_steps=num_steps)
    assert len(partial.response.tokens) == num_steps
    elsewhere = engine_of(max_running_requests=6)
    continued = run(elsewhere, *mixed_requests()[:5], replace(request, partial=partial.response))["a"]
    assert continued == alone(TINY, request)


def stopped_after(engine: EmbeddedEngine, request: GenerationRequest, *, num_steps: int) -> tuple[Generation, ...]:
    engine.submit(request)
    for _ in range(num_steps):
        assert engine.poll() == ()
    return engine.abort()


class ScheduleMachine:
    """Plays a random history on one engine, continues every aborted request, and collects the responses."""

    def __init__(self) -> None:
        self.engine = engine_of(max_running_requests=3)
        self.requests = {request.id: request for request in mixed_requests()[:6]}
        self.pending = list(self.requests.values())
        self.finished: dict[RequestId, Generation] = {}

    def play(self, move: str) -> None:
        if move == "submit" and self.pending:
            self.engine.submit(self.pending.pop(0))
        elif move == "poll":
            self.finished |= {generation.id: generation for generation in self.engine.poll()}
        elif move == "abort":
            self._put_back(self.engine.abort())
        elif move == "pause by abort":
            self._put_back(self.engine.pause(PauseMode.ABORT))
        elif move == "pause by retraction":
            self.engine.pause(PauseMode.RETRACT)
        elif move == "resume":
            self.engine.resume()

    def play_to_the_end(self) -> None:
        self.engine.resume()
        for request in self.pending:
            self.engine.submit(request)
        self.finished |= {RequestId(id_): generation for id_, generation in finish(self.engine).items()}

    def _put_back(self, aborted: tuple[Generation, ...]) -> None:
        for generation in aborted:
            self.pending.append(replace(self.requests[generation.id], partial=generation.response))


MOVES = st.lists(
    st.sampled_from(["submit"] * 3 + ["poll"] * 6 + ["abort", "pause by abort", "pause by retraction", "resume"]),
    max_size=60,
)


@pytest.mark.long
def test_no_history_of_pauses_and_aborts_leaves_a_trace_in_any_response() -> None:
    want = {request.id: alone(TINY, request) for request in mixed_requests()[:6]}

    @settings(max_examples=15)
    @given(moves=MOVES)
    def check(moves: list[str]) -> None:
        machine = ScheduleMachine()
        for move in moves:
            machine.play(move)
        machine.play_to_the_end()
        assert machine.finished == want

    check()


def test_a_longer_neighbour_with_weights_of_nan_leaves_nothing_in_the_slot_it_used() -> None:
    engine = engine_of(max_running_requests=1)
    want = run(engine, request_of())["a"]
    poisoned = [(name, torch.full_like(tensor, float("nan"))) for name, tensor in random_weights(TINY)]
    engine.update_weights(2, poisoned)
    run(engine, request_of("nan", prompt=[1] * 100, sampling=SamplingParams(max_new_tokens=20)))
    engine.update_weights(1, random_weights(TINY))
    assert run(engine, request_of())["a"] == want


def test_the_rows_that_this_machine_computes_alike_include_the_reference() -> None:
    counts = probe_row_counts(TINY).counts
    assert 64 in counts
    assert list(counts) == sorted(counts)


def test_a_response_of_a_partial_counts_positions_from_the_start_of_the_response() -> None:
    whole = alone(TINY, request_of()).response
    first = Response(whole.tokens[:1], whole.log_probs[:1], (replace(whole.versions[0], end=1),))
    assert alone(TINY, request_of(partial=first)).response == whole
