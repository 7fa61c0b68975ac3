"""Small models with random weights, and helpers for tests of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import (
    Engine,
    Generation,
    GenerationRequest,
    RequestId,
    Response,
    SamplingParams,
)
from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

TINY = ModelConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=61,
    max_seq_len=160,
)
"""head_dim * num_heads != hidden_size, an odd vocabulary, and room for three blocks of keys."""


def random_weights(config: ModelConfig, *, seed: int = 0, padding_rows: int = 3) -> list[tuple[str, torch.Tensor]]:
    """A full set of weights with norms around 1. If the engine read padding rows, they would win every draw."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for parameter in model_parameters(config, padded_vocab=config.vocab_size):
        name, shape = parameter.name, parameter.shape
        tensor = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
        if len(shape) == 1:
            tensor += 1
        if name in (EMBEDDING, OUTPUT):
            tensor = torch.cat((tensor * shape[-1] ** 0.5, torch.full((padding_rows, shape[1]), 50.0)))
        tensors.append((name, tensor))
    return tensors


def engine_of(
    config: ModelConfig = TINY, *, max_running_requests: int = 8, weights_seed: int = 0, **options: Any
) -> EmbeddedEngine:
    """An engine that is awake, with random weights as version 1. `options` are further ones of the engine."""
    engine = EmbeddedEngine(config, max_running_requests=max_running_requests, **options)
    engine.update_weights(1, random_weights(config, seed=weights_seed))
    return engine


def request_of(
    name: str = "a",
    *,
    prompt: Iterable[int] = (5, 17, 3),
    sampling: SamplingParams | None = None,
    partial: Response | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        id=RequestId(name),
        prompt_tokens=tuple(prompt),
        sampling=sampling or SamplingParams(max_new_tokens=12, seed=7),
        partial=partial or Response(),
    )


def finish(engine: Engine) -> dict[str, Generation]:
    """Poll until nothing is inside. Raises AssertionError when an id comes out twice."""
    finished: dict[str, Generation] = {}
    while num_inside(engine):
        for generation in engine.poll(wait_s=1.0):
            assert generation.id not in finished, f"{generation.id} came out twice"
            finished[generation.id] = generation
    return finished


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, Generation]:
    for request in requests:
        engine.submit(request)
    return finish(engine)


def generate_until_used(engine: Engine, num_tokens: int) -> None:
    """Poll until the cache holds that many tokens. No request may finish before that."""
    while engine.load().num_used_tokens < num_tokens:
        assert not engine.poll(), "a request finished before the cache held the tokens asked for"


def num_inside(engine: Engine) -> int:
    load = engine.load()
    return load.num_running + load.num_waiting
