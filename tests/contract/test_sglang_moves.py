"""Responses that move from one real SGLang server to another, on the CPU in fp32, and a server that stands by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.rollout.engine import FinishReason, Generation, PauseMode, RequestId, Response, SamplingParams
from services.rollout.sglang.engine import SglangEngine
from tests.sglang_env import settings_in, slowed_down
from tests.unit.rollout.tiny_models import TINY, finish, generate_until_used, random_weights, request_of, run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

GREEDY = SamplingParams(max_new_tokens=100, temperature=0)
NEAR = 2e-5
"""The distance of log-probabilities in fp32: a prefill sums in another order than a decode step."""
POSITIONS = (1, 2, 7, 8, 9, 31, 64, 98)
"""Around the server's messages of 8 tokens, near the begin and the end, and between."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangEngine, SglangEngine]]:
    first = SglangEngine(settings_in(tmp_path_factory.mktemp("first")))
    try:
        second = SglangEngine(settings_in(tmp_path_factory.mktemp("second")))
    except BaseException:
        first.close()
        raise
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def pair(servers: tuple[SglangEngine, SglangEngine]) -> tuple[SglangEngine, SglangEngine]:
    """Two engines as new: awake, empty, not paused, with weights version 1."""
    for engine in servers:
        engine.wake()
        engine.abort()
        engine.resume()
        engine.update_weights(1, random_weights(TINY, seed=1))
        slowed_down(engine)
    return servers


def first_tokens(response: Response, num_tokens: int) -> Response:
    (span,) = response.versions
    return Response(response.tokens[:num_tokens], response.log_probs[:num_tokens], (replace(span, end=num_tokens),))


def assert_continues(moved: Response, kept: Response, unmoved: Response) -> None:
    """What was kept has its own values, and the rest differs from the unmoved response by rounding alone."""
    num_kept = len(kept.tokens)
    assert (moved.tokens[:num_kept], moved.log_probs[:num_kept]) == (kept.tokens, kept.log_probs)
    assert (moved.tokens, moved.versions) == (unmoved.tokens, unmoved.versions)
    assert moved.log_probs == pytest.approx(unmoved.log_probs, rel=0, abs=NEAR)


def test_a_response_that_moves_at_any_position_keeps_its_values_and_goes_on_as_if_it_had_not(
    pair: tuple[SglangEngine, SglangEngine],
) -> None:
    first, second = pair
    whole = run(first, request_of(sampling=GREEDY))["a"].response
    for position in POSITIONS:
        kept = first_tokens(whole, position)
        moved = run(second, request_of(sampling=GREEDY, partial=kept))["a"].response
        assert_continues(moved, kept, whole)


def test_running_and_waiting_requests_leave_at_once_without_losing_a_token_and_end_elsewhere(
    pair: tuple[SglangEngine, SglangEngine],
) -> None:
    first, second = pair
    names = [f"r{index}" for index in range(5)]
    prompts = {name: (5, 17, 3 + index) for index, name in enumerate(names)}
    requests = [request_of(name, prompt=prompts[name], sampling=GREEDY) for name in names]
    whole = run(first, *requests)
    made: dict[str, Generation] = {name: Generation(RequestId(name), Response(), FinishReason.ABORT) for name in names}
    for engine, used in ((first, 30), (second, 90), (first, 180)):
        for request in requests:
            engine.submit(replace(request, partial=made[request.id].response))
        generate_until_used(engine, used)
        left: dict[str, Generation] = {generation.id: generation for generation in engine.abort()}
        assert list(left) == names
        for name in names:
            assert_continues(left[name].response, made[name].response, first_tokens_of(whole[name], left[name]))
        assert engine.load().num_lost_tokens == 0
        made = left
    lengths = {len(made[name].response.tokens) for name in names}
    assert max(lengths) > 40
    finished = run(second, *(replace(request, partial=made[request.id].response) for request in requests))
    for name in names:
        assert_continues(finished[name].response, made[name].response, whole[name].response)


def first_tokens_of(whole: Generation, part: Generation) -> Response:
    return first_tokens(whole.response, len(part.response.tokens)) if part.response.tokens else Response()


def test_the_lost_tokens_of_a_retracted_request_are_counted(pair: tuple[SglangEngine, SglangEngine]) -> None:
    """The server retracts all of three running requests, and takes two back beside one that waited.

    The versions tell how many tokens those two had by then, and the KV cache how many all three had."""
    engine, _ = pair
    names = ["a", "b", "c", "d"]
    for name in names:
        engine.submit(request_of(name, sampling=GREEDY))
    generate_until_used(engine, 60)
    engine.pause(PauseMode.IN_PLACE)
    load = engine.load()
    assert (load.num_running, load.num_waiting) == (3, 1)
    # Each of the three has a prompt of 3 tokens in the cache, and its last token not yet.
    num_made = load.num_used_tokens - 3 * 3 + 3
    engine.pause(PauseMode.RETRACT)
    engine.update_weights(2, random_weights(TINY, seed=2))
    engine.resume()
    while engine.load().num_running < 3:
        assert not engine.poll(), "no request ends before the abort"
    before = engine.load().num_lost_tokens
    left = [generation.response for generation in engine.abort()]
    continued = [each.versions[0].end for each in left if [span.version for span in each.versions] == [1, 2]]
    (retracted,) = [each for each in left if [span.version for span in each.versions] == [1]]
    assert len(continued) == 2
    lost = engine.load().num_lost_tokens - before
    assert lost == num_made - sum(continued) - len(retracted.tokens)
    assert 0 <= lost <= engine.features.max_lost_tokens


def test_an_engine_that_sleeps_keeps_its_server_and_only_needs_weights_again(
    pair: tuple[SglangEngine, SglangEngine],
) -> None:
    engine, _ = pair
    want = run(engine, request_of(sampling=GREEDY))["a"].response.tokens
    processes = engine.server.processes()
    engine.sleep()
    assert all(process.is_running() for process in processes)
    assert engine.server_bytes > 0, "on a CPU nothing releases it"
    engine.wake()
    assert engine.server.processes() == processes
    engine.update_weights(3, random_weights(TINY, seed=1))
    assert run(engine, request_of(sampling=GREEDY))["a"].response.tokens == want


def test_an_engine_that_is_paused_sleeps_and_wakes_unpaused(pair: tuple[SglangEngine, SglangEngine]) -> None:
    engine, _ = pair
    engine.pause(PauseMode.RETRACT)
    engine.sleep()
    engine.wake()
    engine.update_weights(1, random_weights(TINY, seed=1))
    engine.submit(request_of())
    assert list(finish(engine)) == ["a"]
