"""An engine under a pace: its steps last as long as modelled, its responses have the same bits, and it answers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import FinishReason, PauseMode, SamplingParams
from tests.unit.pace.hands import Hands
from tests.unit.rollout.tiny_models import engine_of, request_of, run
from tidegate.config.sections.pace import PaceSection
from tidegate.pace.law import PaceLaw
from tidegate.runtime.pacer import Pacer

LAW = PaceLaw(PaceSection(tokens_per_token=50, responses_per_response=4))
NUM_TOKENS = 12
PROMPT = (5, 17, 3)


def paced_engine(hands: Hands, counts: list[Mapping[str, int]]) -> EmbeddedEngine:
    pacer = Pacer(LAW, on_counts=counts.append, clock=hands, sleep=hands.sleep)
    return engine_of(clock=hands, pacer=pacer)


def decode_s(num_sequences: int, *, num_made: int) -> float:
    """A step in which each sequence has made `num_made` tokens before."""
    cached = num_sequences * (len(PROMPT) + num_made - 1)
    return LAW.decode_s(num_sequences=num_sequences, num_kv_tokens=cached)


def test_responses_have_the_bits_of_an_unpaced_engine() -> None:
    requests = [
        request_of(f"r{index}", sampling=SamplingParams(max_new_tokens=4 + index, seed=index)) for index in range(11)
    ]
    counts = list[Mapping[str, int]]()
    assert run(paced_engine(Hands(), counts), *requests) == run(engine_of(), *requests)
    assert counts, "steps were counted"
    assert not any(count["late_steps"] for count in counts)


def test_a_response_takes_the_modelled_time_of_its_steps() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    run(paced_engine(hands, counts), request_of("a"), request_of("b"))
    want_s = LAW.prefill_s(2 * len(PROMPT)) + sum(decode_s(2, num_made=made) for made in range(1, NUM_TOKENS))
    assert hands.now_s - 100.0 == pytest.approx(want_s)
    assert len(counts) == NUM_TOKENS


def test_a_prompt_that_comes_runs_in_one_step_with_those_that_run() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    engine = paced_engine(hands, counts)
    engine.submit(request_of("a"))
    engine.poll(wait_s=LAW.prefill_s(len(PROMPT)))
    engine.submit(request_of("b"))
    began_s = hands.now_s
    engine.poll(wait_s=LAW.prefill_s(len(PROMPT)) + decode_s(1, num_made=1))
    assert hands.now_s - began_s == pytest.approx(LAW.prefill_s(len(PROMPT)) + decode_s(1, num_made=1))
    assert len(counts) == 2
    assert {"a": 2, "b": 1}.items() <= dict(engine.lengths()).items()


def test_a_poll_waits_no_longer_than_it_may() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    engine = paced_engine(hands, counts)
    engine.submit(request_of("a"))
    assert engine.poll(wait_s=LAW.prefill_s(3) / 2) == ()
    assert hands.now_s == pytest.approx(100.0 + LAW.prefill_s(3) / 2)
    assert counts == []
    assert engine.poll(wait_s=LAW.prefill_s(3)) == ()
    assert len(counts) == 1


@pytest.mark.parametrize("mode", list(PauseMode))
def test_calls_are_answered_while_a_step_is_open(mode: PauseMode) -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    engine = paced_engine(hands, counts)
    engine.submit(request_of("a"))
    engine.poll(wait_s=0.0)
    began_s = hands.now_s
    assert dict(engine.lengths()) == {"a": 1}
    assert engine.load().num_running == 1
    aborted = engine.pause(mode) or engine.abort()
    assert [len(each.response.tokens) for each in aborted] == [1]
    assert hands.now_s == began_s
    engine.resume()
    engine.submit(request_of("b"))
    hands.now_s += 1000.0
    engine.poll(wait_s=0.0)
    assert counts == [], "the interrupted step was late by no fault of its own"


def test_an_abort_before_the_end_of_its_last_step_hands_a_response_back_as_finished() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    engine = paced_engine(hands, counts)
    engine.submit(request_of("a", sampling=SamplingParams(max_new_tokens=1, seed=7)))
    assert engine.poll(wait_s=0.0) == ()
    (response,) = engine.abort()
    assert response.finish_reason is FinishReason.LENGTH
    hands.now_s += 1.0
    assert engine.poll(wait_s=0.0) == ()


def test_a_retraction_before_the_end_of_its_last_step_does_not_run_a_finished_sequence_again() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    engine = paced_engine(hands, counts)
    engine.submit(request_of("a", sampling=SamplingParams(max_new_tokens=1, seed=7)))
    assert engine.poll(wait_s=0.0) == ()
    engine.pause(PauseMode.RETRACT)
    engine.resume()
    (response,) = engine.poll(wait_s=1.0)
    assert (response.finish_reason, len(response.response.tokens)) == (FinishReason.LENGTH, 1)


def test_the_next_step_begins_only_after_the_open_one() -> None:
    hands, counts = Hands(), list[Mapping[str, int]]()
    engine = paced_engine(hands, counts)
    engine.submit(request_of("a"))
    for _ in range(5):
        engine.poll(wait_s=0.0)
    assert dict(engine.lengths()) == {"a": 1}
