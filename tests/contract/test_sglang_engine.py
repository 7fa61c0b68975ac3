"""A real SGLang server on the CPU keeps the contract of every engine, and agrees with the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.rollout.engine import PauseMode, RequestId, SamplingParams
from services.rollout.sglang.client import CallFailed, SglangClient
from services.rollout.sglang.engine import SglangEngine
from tests.contract.engine_suite import EngineSuite, Subject
from tests.sglang_env import settings_in, slowed_down
from tests.unit.rollout.tiny_models import TINY, engine_of, finish, generate_until_used, random_weights, request_of, run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """One server for all tests of this file."""
    engine = SglangEngine(settings_in(tmp_path_factory.mktemp("sglang")))
    yield engine
    engine.close()


@pytest.fixture
def awake(engine: SglangEngine) -> SglangEngine:
    """The engine as new: awake, empty, not paused, with weights version 1."""
    engine.wake()
    engine.abort()
    engine.resume()
    engine.update_weights(1, random_weights(TINY, seed=1))
    slowed_down(engine)
    return engine


class TestSglangEngine(EngineSuite):
    @pytest.fixture
    def subject(self, awake: SglangEngine) -> Subject:
        return Subject(engine=awake, config=TINY, weights=lambda seed: random_weights(TINY, seed=seed), num_slots=3)


class TestSglangServer:
    def test_sglang_gives_the_tokens_and_log_probabilities_of_the_embedded_engine(self, awake: SglangEngine) -> None:
        request = request_of(sampling=SamplingParams(max_new_tokens=60, temperature=0))
        want = run(engine_of(TINY, weights_seed=1), request)["a"].response
        response = run(awake, request)["a"].response
        assert response.tokens == want.tokens
        assert response.log_probs == pytest.approx(want.log_probs, abs=2e-5)

    def test_a_drawn_tokens_log_probability_is_of_the_scaled_and_whole_distribution(self, awake: SglangEngine) -> None:
        sampling = SamplingParams(max_new_tokens=1, temperature=0.5, top_p=0.5)
        drawn = run(awake, request_of(sampling=sampling))["a"].response
        candidates = (
            run(engine_of(TINY, weights_seed=1), request_of(sampling=SamplingParams(1, temperature=0.5, seed=seed)))
            for seed in range(500)
        )
        want = next(each["a"].response for each in candidates if each["a"].response.tokens == drawn.tokens)
        assert drawn.log_probs == pytest.approx(want.log_probs, abs=2e-5)

    def test_the_server_answers_nobody_without_its_token(self, awake: SglangEngine) -> None:
        stranger = SglangClient(awake.server.client.port, "guessed")
        with pytest.raises(CallFailed, match="status 401"):
            stranger.post("/generate", {"input_ids": [1]}, timeout_s=10.0)

    def test_a_request_whose_id_begins_with_the_id_of_another_survives_an_abort_of_the_other(
        self, awake: SglangEngine
    ) -> None:
        for name in ("a", "ab"):
            awake.submit(request_of(name, sampling=SamplingParams(max_new_tokens=100, temperature=0)))
        generate_until_used(awake, 20)
        awake.abort([RequestId("a")])
        assert awake.load().num_running + awake.load().num_waiting == 1
        awake.abort()

    def test_a_retraction_frees_the_servers_own_cache_and_a_pause_in_place_keeps_it(self, awake: SglangEngine) -> None:
        """The server flushes its cache only while the cache holds nothing of a request."""
        awake.submit(request_of(sampling=SamplingParams(max_new_tokens=100, temperature=0)))
        generate_until_used(awake, 20)
        awake.pause(PauseMode.IN_PLACE)
        with pytest.raises(CallFailed, match="status 400"):
            awake.server.client.get("/flush_cache", timeout_s=10.0)
        awake.pause(PauseMode.RETRACT)
        with pytest.raises(CallFailed, match=r"with invalid JSON: b'Cache flushed"):
            awake.server.client.get("/flush_cache", timeout_s=10.0)
        awake.resume()
        assert len(finish(awake)["a"].response.tokens) == 100
