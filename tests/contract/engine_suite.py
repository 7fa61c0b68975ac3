"""The contract suite of generation engines. A subclass provides the `subject` fixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from services.rollout.engine import (
    Engine,
    EngineNotReady,
    FinishReason,
    PauseMode,
    RequestId,
    RequestRefused,
    Response,
    SamplingParams,
    UnknownRequest,
    VersionSpan,
    WeightsRefused,
)
from tests.unit.rollout.tiny_models import finish, generate_until_used, num_inside, request_of, run
from tidegate.model_config import ModelConfig

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
SHORT = SamplingParams(max_new_tokens=12, seed=7)


@dataclass(frozen=True)
class Subject:
    """An awake engine with version 1 of the weights, `weights(1)`. It runs `num_slots` requests at once."""

    engine: Engine
    config: ModelConfig
    weights: Callable[[int], list[tuple[str, torch.Tensor]]]
    num_slots: int

    @property
    def short(self) -> SamplingParams:
        """Sampling of 12 tokens that is reproducible."""
        return replace(SHORT, temperature=1.0 if self.engine.features.repeats_draws else 0)

    @property
    def long(self) -> SamplingParams:
        """Sampling of 100 tokens that is reproducible."""
        return replace(self.short, max_new_tokens=100)

    def assert_same(self, response: Response, want: Response) -> None:
        """Compare to the bit where the engine repeats draws.

        Elsewhere other requests in the batch may change the rounding."""
        assert (response.tokens, response.versions) == (want.tokens, want.versions)
        nearness = 0.0 if self.engine.features.repeats_draws else 2e-5
        assert response.log_probs == pytest.approx(want.log_probs, rel=0, abs=nearness)


class EngineSuite:
    """The contract of `services.rollout.engine.Engine`."""

    def test_every_request_comes_out_once_even_with_more_requests_than_slots(self, subject: Subject) -> None:
        names = [f"r{index}" for index in range(2 * subject.num_slots + 1)]
        finished = run(subject.engine, *(request_of(name) for name in names))
        assert sorted(finished) == sorted(names)
        assert subject.engine.poll() == ()

    def test_a_response_ends_at_max_new_tokens_with_a_log_probability_for_each_token(self, subject: Subject) -> None:
        generation = run(subject.engine, request_of())["a"]
        assert generation.finish_reason is FinishReason.LENGTH
        assert len(generation.response.tokens) == 12
        assert all(math.isfinite(log_prob) and log_prob <= 0 for log_prob in generation.response.log_probs)
        assert generation.response.versions == (VersionSpan(version=1, start=0, end=12),)

    def test_each_stop_token_ends_a_response_and_belongs_to_it(self, subject: Subject) -> None:
        whole = run(subject.engine, request_of(sampling=GREEDY))["a"].response
        stop = whole.tokens[4]
        absent = next(token for token in range(subject.config.vocab_size) if token not in whole.tokens)
        want = whole.tokens[: whole.tokens.index(stop) + 1]
        for stops in ((stop,), (stop, absent), (absent, stop)):
            generation = run(subject.engine, request_of(sampling=replace(GREEDY, stop_token_ids=stops)))["a"]
            assert generation.finish_reason is FinishReason.STOP
            assert generation.response.tokens == want
            assert len(generation.response.log_probs) == len(want)

    def test_a_request_inside_an_engine_has_a_length_until_it_leaves(self, subject: Subject) -> None:
        assert subject.engine.lengths() == {}
        subject.engine.submit(request_of("a", sampling=subject.long))
        subject.engine.submit(request_of("b", sampling=subject.long))
        assert set(subject.engine.lengths()) == {"a", "b"}
        generate_until_used(subject.engine, 20)
        assert all(0 <= length < 100 for length in subject.engine.lengths().values())
        assert max(subject.engine.lengths().values()) > 0
        subject.engine.abort([RequestId("a")])
        assert set(subject.engine.lengths()) == {"b"}
        subject.engine.abort()

    def test_a_request_with_another_seed_draws_another_response(self, subject: Subject) -> None:
        other = replace(SHORT, seed=8)
        finished = run(subject.engine, request_of("a", sampling=SHORT), request_of("other", sampling=other))
        assert finished["other"].response.tokens != finished["a"].response.tokens

    def test_the_same_request_comes_out_the_same_again(self, subject: Subject) -> None:
        """The request draws by its seed where the engine repeats draws; else it is greedy."""
        finished = run(
            subject.engine, request_of("a", sampling=subject.short), request_of("same", sampling=subject.short)
        )
        subject.assert_same(finished["same"].response, finished["a"].response)

    def test_an_abort_hands_back_every_token_made_so_far(self, subject: Subject) -> None:
        whole = run(subject.engine, request_of(sampling=subject.long))["a"].response
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        (aborted,) = subject.engine.abort([RequestId("a")])
        assert aborted.finish_reason is FinishReason.ABORT
        num_made = len(aborted.response.tokens)
        assert 0 < num_made < 100
        assert aborted.response.tokens == whole.tokens[:num_made]
        assert num_inside(subject.engine) == 0

    def test_an_abort_of_all_hands_back_running_and_waiting_requests_in_order(self, subject: Subject) -> None:
        names = [f"r{index}" for index in range(subject.num_slots + 2)]
        for name in names:
            subject.engine.submit(request_of(name, sampling=subject.long))
        generate_until_used(subject.engine, 10)
        aborted = subject.engine.abort()
        assert [generation.id for generation in aborted] == names
        assert aborted[0].response.tokens
        assert not aborted[-1].response.tokens, "the last one never had a slot"
        assert subject.engine.abort() == ()

    def test_an_abort_of_one_leaves_the_others_running(self, subject: Subject) -> None:
        for name in ("a", "b"):
            subject.engine.submit(request_of(name, sampling=subject.long))
        generate_until_used(subject.engine, 20)
        subject.engine.abort([RequestId("a")])
        finished = finish(subject.engine)
        assert list(finished) == ["b"]
        assert len(finished["b"].response.tokens) == 100

    def test_a_continued_partial_keeps_its_tokens_log_probabilities_and_versions(self, subject: Subject) -> None:
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        (aborted,) = subject.engine.abort()
        subject.engine.update_weights(2, subject.weights(2))
        generation = run(subject.engine, request_of(sampling=subject.long, partial=aborted.response))["a"]
        num_kept = len(aborted.response.tokens)
        assert len(generation.response.tokens) == 100
        assert generation.response.tokens[:num_kept] == aborted.response.tokens
        assert generation.response.log_probs[:num_kept] == aborted.response.log_probs
        assert generation.response.versions == (VersionSpan(1, 0, num_kept), VersionSpan(2, num_kept, 100))

    def test_aborting_an_unknown_id_takes_nothing_out(self, subject: Subject) -> None:
        subject.engine.submit(request_of("a"))
        with pytest.raises(UnknownRequest, match="gone"):
            subject.engine.abort([RequestId("a"), RequestId("gone")])
        assert list(finish(subject.engine)) == ["a"]

    def test_an_id_that_is_inside_is_refused_and_can_be_used_again_afterwards(self, subject: Subject) -> None:
        subject.engine.submit(request_of("a"))
        with pytest.raises(RequestRefused, match="request a: this id is inside"):
            subject.engine.submit(request_of("a"))
        assert list(finish(subject.engine)) == ["a"]
        assert list(run(subject.engine, request_of("a"))) == ["a"]

    def test_a_request_longer_than_the_model_is_refused_with_what_would_fit(self, subject: Subject) -> None:
        limit = subject.config.max_seq_len
        with pytest.raises(RequestRefused, match=rf"= {limit + 1} exceed max_seq_len {limit}; at most 12 new tokens"):
            subject.engine.submit(request_of(prompt=[1] * (limit - 12), sampling=SamplingParams(max_new_tokens=13)))
        longest = request_of(prompt=[1] * (limit - 12), sampling=SamplingParams(max_new_tokens=12))
        assert len(run(subject.engine, longest)["a"].response.tokens) == 12

    @pytest.mark.parametrize(
        ("prompt", "stop", "message"),
        [
            pytest.param((), None, "the prompt is empty", id="an empty prompt"),
            pytest.param((1, "V"), None, "prompt token {V} at position 1", id="the first padding token"),
            pytest.param((-1,), None, "prompt token -1 at position 0", id="a negative token"),
            pytest.param((1,), "V", "stop token {V}", id="a stop token that cannot come"),
        ],
    )
    def test_a_request_with_tokens_outside_the_vocabulary_is_refused(
        self, subject: Subject, prompt: tuple[int | str, ...], stop: str | None, message: str
    ) -> None:
        size = subject.config.vocab_size
        tokens = [size if token == "V" else int(token) for token in prompt]
        sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(1, size) if stop else ())
        with pytest.raises(RequestRefused, match=message.format(V=size)):
            subject.engine.submit(request_of(prompt=tokens, sampling=sampling))
        assert num_inside(subject.engine) == 0

    def test_a_partial_with_nothing_left_to_generate_is_refused(self, subject: Subject) -> None:
        done = run(subject.engine, request_of())["a"].response
        with pytest.raises(RequestRefused, match="12 tokens of max_new_tokens 12"):
            subject.engine.submit(request_of(partial=done))
        ended = SamplingParams(max_new_tokens=40, stop_token_ids=(subject.config.vocab_size - 1, done.tokens[-1]))
        with pytest.raises(RequestRefused, match="holds the stop token"):
            subject.engine.submit(request_of(sampling=ended, partial=done))

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
    def test_a_paused_engine_makes_no_token_and_continues_at_the_same_place(
        self, subject: Subject, mode: PauseMode
    ) -> None:
        want = run(subject.engine, request_of(sampling=subject.long))["a"].response.tokens
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        assert subject.engine.pause(mode) == ()
        assert subject.engine.pause(mode) == ()
        before = subject.engine.load()
        assert subject.engine.poll(wait_s=0.01) == ()
        assert subject.engine.load() == before
        subject.engine.resume()
        assert finish(subject.engine)["a"].response.tokens == want

    def test_a_pause_in_place_keeps_the_cache_and_a_retraction_frees_it(self, subject: Subject) -> None:
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        subject.engine.pause(PauseMode.IN_PLACE)
        assert subject.engine.load().num_used_tokens >= 20
        subject.engine.pause(PauseMode.RETRACT)
        load = subject.engine.load()
        assert (load.num_used_tokens, load.num_running, load.num_waiting) == (0, 0, 1)

    def test_a_pause_that_aborts_hands_everything_back(self, subject: Subject) -> None:
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        (aborted,) = subject.engine.pause(PauseMode.ABORT)
        assert (aborted.id, aborted.finish_reason) == ("a", FinishReason.ABORT)
        assert aborted.response.tokens
        assert num_inside(subject.engine) == 0

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
    def test_an_abort_in_a_pause_hands_back_the_tokens_made_before(self, subject: Subject, mode: PauseMode) -> None:
        whole = run(subject.engine, request_of(sampling=subject.long))["a"].response
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        subject.engine.pause(mode)
        (aborted,) = subject.engine.abort()
        assert aborted.finish_reason is FinishReason.ABORT
        num_made = len(aborted.response.tokens)
        assert 20 - subject.engine.features.max_lost_tokens <= 3 + num_made < 103
        assert aborted.response.tokens == whole.tokens[:num_made]

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
    def test_an_abort_of_one_in_a_pause_has_the_others_make_no_token(self, subject: Subject, mode: PauseMode) -> None:
        """A token made in the pause would have version 2, which the engine has only during the pause."""
        for name in ("a", "b"):
            subject.engine.submit(request_of(name, sampling=subject.long))
        generate_until_used(subject.engine, 60)
        subject.engine.pause(mode)
        subject.engine.update_weights(2, subject.weights(2))
        (aborted,) = subject.engine.abort([RequestId("a")])
        assert [span.version for span in aborted.response.versions] == [1]
        subject.engine.update_weights(3, subject.weights(3))
        subject.engine.resume()
        finished = finish(subject.engine)
        assert [span.version for span in finished["b"].response.versions] == [1, 3]
        assert finished["b"].response.versions[-1].end == 100

    def test_an_abort_in_a_pause_finds_a_request_sent_just_before(self, subject: Subject) -> None:
        names = [f"r{index}" for index in range(2 * subject.num_slots)]
        for name in names:
            subject.engine.submit(request_of(name, sampling=subject.long))
        subject.engine.pause(PauseMode.IN_PLACE)
        assert [generation.id for generation in subject.engine.abort()] == names

    def test_a_request_sent_in_a_pause_waits_and_runs_on_the_weights_of_the_resume(self, subject: Subject) -> None:
        subject.engine.pause(PauseMode.IN_PLACE)
        subject.engine.submit(request_of())
        assert subject.engine.poll() == ()
        assert subject.engine.load().num_waiting == 1
        subject.engine.update_weights(2, subject.weights(2))
        subject.engine.resume()
        assert finish(subject.engine)["a"].response.versions == (VersionSpan(version=2, start=0, end=12),)

    def test_resuming_an_engine_that_is_not_paused_changes_nothing(self, subject: Subject) -> None:
        subject.engine.resume()
        assert list(run(subject.engine, request_of())) == ["a"]

    def test_a_weight_update_between_two_tokens_splits_the_versions_there(self, subject: Subject) -> None:
        old = run(subject.engine, request_of(sampling=subject.long))["a"].response.tokens
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        subject.engine.update_weights(2, subject.weights(2))
        assert subject.engine.version == 2
        response = finish(subject.engine)["a"].response
        first, second = response.versions
        assert (first.version, second.version, second.end) == (1, 2, 100)
        assert 0 < first.end < 100
        assert response.tokens[: first.end] == old[: first.end]
        assert response.tokens != old

    def test_a_retraction_over_a_weight_update_recomputes_the_cache_with_the_new_weights(
        self, subject: Subject
    ) -> None:
        subject.engine.submit(request_of(sampling=subject.long))
        generate_until_used(subject.engine, 20)
        subject.engine.pause(PauseMode.RETRACT)
        subject.engine.update_weights(2, subject.weights(2))
        subject.engine.resume()
        retracted = finish(subject.engine)["a"].response
        num_old = retracted.versions[0].end
        kept = replace(
            retracted,
            tokens=retracted.tokens[:num_old],
            log_probs=retracted.log_probs[:num_old],
            versions=retracted.versions[:1],
        )
        continued = run(subject.engine, request_of(sampling=subject.long, partial=kept))["a"].response
        assert retracted.tokens == continued.tokens

    def test_a_refused_update_leaves_the_old_weights_in_force(self, subject: Subject) -> None:
        want_checksums = dict(subject.engine.checksums())
        want = run(subject.engine, request_of(sampling=subject.short))["a"].response
        with pytest.raises(WeightsRefused, match=r"1 of \d+ tensors are missing"):
            subject.engine.update_weights(2, subject.weights(2)[:-1])
        assert subject.engine.version == 1
        assert subject.engine.checksums() == want_checksums
        subject.assert_same(run(subject.engine, request_of(sampling=subject.short))["a"].response, want)

    def test_checksums_name_every_tensor_and_follow_its_elements(self, subject: Subject) -> None:
        first = dict(subject.engine.checksums())
        assert sorted(first) == sorted(name for name, _ in subject.weights(1))
        changed = [(name, tensor.clone()) for name, tensor in subject.weights(1)]
        name, tensor = changed[2]
        tensor[0, 0] += 1
        subject.engine.update_weights(2, changed)
        second = subject.engine.checksums()
        assert [key for key in first if second[key] != first[key]] == [name]
        subject.engine.update_weights(3, subject.weights(1))
        assert subject.engine.checksums() == first

    def test_an_engine_with_a_request_inside_does_not_sleep(self, subject: Subject) -> None:
        subject.engine.submit(request_of())
        with pytest.raises(EngineNotReady, match="1 requests inside"):
            subject.engine.sleep()
        assert list(finish(subject.engine)) == ["a"]

    def test_a_sleeping_engine_has_no_weights_and_accepts_no_request(self, subject: Subject) -> None:
        subject.engine.sleep()
        subject.engine.sleep()
        assert (subject.engine.version, dict(subject.engine.checksums())) == (None, {})
        assert subject.engine.load().num_capacity_tokens == 0
        with pytest.raises(EngineNotReady, match="sleeps"):
            subject.engine.submit(request_of())
        with pytest.raises(EngineNotReady, match="sleeps"):
            subject.engine.update_weights(2, subject.weights(2))

    def test_an_engine_that_woke_needs_weights_and_then_generates_as_before(self, subject: Subject) -> None:
        want = run(subject.engine, request_of(sampling=subject.short))["a"].response
        subject.engine.sleep()
        subject.engine.wake()
        subject.engine.wake()
        with pytest.raises(EngineNotReady, match="no weights"):
            subject.engine.submit(request_of())
        subject.engine.update_weights(1, subject.weights(1))
        assert subject.engine.load().num_capacity_tokens > 0
        subject.assert_same(run(subject.engine, request_of(sampling=subject.short))["a"].response, want)
