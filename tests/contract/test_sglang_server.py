"""A real SGLang server on the CPU: other model families, its sockets, its death. Each test starts its own."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.rollout.engine import EngineFailed, SamplingParams
from services.rollout.sglang.engine import SglangEngine
from tests.sglang_env import settings_in, slowed_down
from tests.unit.rollout.tiny_models import TINY, engine_of, generate_until_used, random_weights, request_of, run
from tidegate.model_config import ModelConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "model",
    [replace(TINY, hidden_size=64, qkv_bias=True, tied_embeddings=True), replace(TINY, qk_norm=True)],
    ids=["Qwen2", "Qwen3"],
)
def test_other_dense_families_generate_what_the_embedded_engine_does(model: ModelConfig, tmp_path: Path) -> None:
    request = request_of(sampling=SamplingParams(max_new_tokens=60, temperature=0))
    want = run(engine_of(model, weights_seed=1), request)["a"].response
    engine = SglangEngine(settings_in(tmp_path, model=model))
    try:
        engine.update_weights(1, random_weights(model, seed=1))
        response = run(engine, request)["a"].response
    finally:
        engine.close()
    assert response.tokens == want.tokens
    assert response.log_probs == pytest.approx(want.log_probs, abs=2e-5)


@pytest.mark.parametrize("victim", ["the server", "its scheduler"])
def test_kill_9_in_mid_generation_is_reported_and_fails_every_call(victim: str, tmp_path: Path) -> None:
    before = shared_memory()
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine = SglangEngine(settings_in(tmp_path), on_death=deaths.put)
    try:
        engine.update_weights(1, random_weights(TINY, seed=1))
        slowed_down(engine)
        engine.submit(request_of(sampling=SamplingParams(max_new_tokens=100)))
        generate_until_used(engine, 20)
        processes = engine.server.processes()
        _, server, *below = processes
        scheduler = next(process for process in below if "scheduler" in " ".join(process.cmdline()))
        (server if victim == "the server" else scheduler).kill()
        assert "SGLang's server" in deaths.get(timeout=30.0)
        with pytest.raises(EngineFailed, match="SGLang's server ended with"):
            engine.poll(wait_s=30.0)
        with pytest.raises(EngineFailed, match="SGLang's server ended with"):
            engine.submit(request_of("b"))
    finally:
        engine.close()
    assert not psutil.wait_procs(processes, timeout=5)[1], "its processes die with it"
    assert shared_memory() <= before


def test_a_server_listens_on_loopback_only_and_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    before = shared_memory()
    settings = settings_in(tmp_path)
    engine = SglangEngine(settings)
    try:
        processes = engine.server.processes()
        hosts = {socket.laddr.ip for socket in listening(processes)}
        assert hosts == {"127.0.0.1"}
        assert settings.scratch.stat().st_mode & 0o777 == 0o700
        assert shared_memory() <= before, "the file of its load has no name any more"
        assert engine.load().num_capacity_tokens > 0
    finally:
        engine.close()
    assert shared_memory() <= before
    assert not settings.scratch.exists()
    assert not psutil.wait_procs(processes, timeout=5)[1]


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("sgl*"))


def listening(processes: list[psutil.Process]) -> list[Any]:
    return [
        socket
        for process in processes
        for socket in process.net_connections(kind="inet")
        if socket.status == psutil.CONN_LISTEN
    ]


def test_a_server_that_does_not_start_fails_with_its_status_and_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"(?s)ended with status \d+; its log is .*dtype"):
        SglangEngine(replace(settings_in(tmp_path), dtype="int7"))
