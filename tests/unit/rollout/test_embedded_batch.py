"""The order in which sequences get slots, and the engine's load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.rollout.embedded.batch import Batch, Sequence
from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import EngineLoad, RequestId, SamplingParams, VersionSpan
from tests.unit.rollout.tiny_models import TINY, engine_of, random_weights, request_of


def batch_of(names: str, *, num_slots: int) -> Batch:
    batch = Batch(num_slots=num_slots)
    for name in names:
        batch.add(request_of(name))
    return batch


def placed(sequences: list[Sequence]) -> list[tuple[str, int | None]]:
    return [(sequence.request.id, sequence.slot) for sequence in sequences]


def test_the_sequences_that_waited_longest_get_the_lowest_free_slots() -> None:
    batch = batch_of("abcde", num_slots=3)
    assert placed(batch.admit()) == [("a", 0), ("b", 1), ("c", 2)]
    assert batch.admit() == []
    batch.remove([RequestId("c"), RequestId("a")])
    assert placed(batch.admit()) == [("d", 0), ("e", 2)]


def test_a_retracted_sequence_keeps_its_place_in_the_order_of_submission() -> None:
    batch = batch_of("abc", num_slots=2)
    batch.admit()
    batch.retract()
    assert batch.running() == []
    assert placed(batch.admit()) == [("a", 0), ("b", 1)]


def test_a_continued_sequence_runs_prompt_and_partial_and_then_only_its_last_token() -> None:
    sequence = Sequence.begin(request_of(prompt=[5, 6]))
    assert sequence.uncached_tokens() == (5, 6)
    sequence.append(9, log_prob=-0.5, version=1)
    assert sequence.uncached_tokens() == (5, 6, 9), "after a retraction all tokens run again"
    sequence.num_cached = 2
    assert sequence.uncached_tokens() == (9,)


def test_tokens_of_one_version_in_a_row_share_a_span() -> None:
    sequence = Sequence.begin(request_of())
    for version in (1, 1, 3, 3, 3, 1):
        sequence.append(4, log_prob=-1.0, version=version)
    assert sequence.versions == [VersionSpan(1, 0, 2), VersionSpan(3, 2, 5), VersionSpan(1, 5, 6)]


def test_the_load_counts_running_waiting_and_cached_tokens() -> None:
    engine = engine_of(max_running_requests=2)
    for name in "abc":
        engine.submit(request_of(name, prompt=[1, 2, 3]))
    assert engine.load() == EngineLoad(0, 3, 0, 2 * TINY.max_seq_len)
    engine.poll()
    assert engine.load() == EngineLoad(2, 1, 6, 2 * TINY.max_seq_len)
    engine.poll()
    assert engine.load() == EngineLoad(2, 1, 8, 2 * TINY.max_seq_len)


def test_a_freed_slot_is_filled_at_the_next_step() -> None:
    engine = engine_of(max_running_requests=1)
    engine.submit(request_of("a", sampling=SamplingParams(max_new_tokens=1)))
    engine.submit(request_of("b"))
    assert [generation.id for generation in engine.poll()] == ["a"]
    engine.poll()
    assert engine.load().num_running == 1


def test_a_poll_waits_no_longer_than_wait_s() -> None:
    now_s = iter(range(100))
    engine = EmbeddedEngine(TINY, clock=lambda: float(next(now_s)))
    engine.update_weights(1, random_weights(TINY))
    engine.submit(request_of(sampling=SamplingParams(max_new_tokens=50)))
    assert engine.poll(wait_s=3.0) == ()
    (aborted,) = engine.abort()
    assert len(aborted.response.tokens) == 3, "the clock moves by one second a step"


@pytest.mark.parametrize("num_requests", [0, 257])
def test_a_batch_beyond_the_reproducible_row_counts_is_refused(num_requests: int) -> None:
    with pytest.raises(ValueError, match=rf"max_running_requests={num_requests} must be in \[1, 256\]"):
        EmbeddedEngine(replace(TINY, num_layers=1), max_running_requests=num_requests)
