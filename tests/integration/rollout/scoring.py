"""Generates with the embedded engine and scores the same tokens with Megatron, in one rank process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.rollout.engine import SamplingParams
from tests.integration.megatron.actor_trainer_ranks import world
from tests.ranks import RankContext, Results
from tests.unit.rollout.tiny_models import TINY, engine_of, random_weights, request_of, run
from tidegate.megatron.batching import BatchLimits, replica_batches
from tidegate.megatron.gpt_provider import DTYPES, GptProvider
from tidegate.megatron.log_probs import forward_log_probs
from tidegate.types import Layout, Precision

PADDED_VOCAB = 64
PROMPTS = [(5, 17, 3), (9,), tuple((7 * position) % TINY.vocab_size for position in range(70))]


def generate_and_score(
    context: RankContext, *, tied: bool, temperature: float, device: str = "cpu", precision: str = "fp32"
) -> Results:
    """For each prompt, the engine's log-probabilities of its response and the trainer's of the same tokens. Both have
    the weights in the trainer's precision."""
    place, dtype = torch.device(device), DTYPES[Precision(precision)]
    config = replace(TINY, tied_embeddings=tied)
    drawn = random_weights(config, padding_rows=PADDED_VOCAB - config.vocab_size)
    weights = {name: tensor.to(dtype) for name, tensor in drawn}
    # The CPU is the engine's default.
    options: dict[str, Any] = {} if device == "cpu" else {"device": place}
    engine = engine_of(config, **options)
    engine.update_weights(2, weights.items())
    sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=11)
    requests = [request_of(str(index), prompt=prompt, sampling=sampling) for index, prompt in enumerate(PROMPTS)]
    finished = run(engine, *requests)
    sequences = [(*prompt, *finished[str(index)].response.tokens) for index, prompt in enumerate(PROMPTS)]
    with world(context, {}, device=place) as ranks:
        provider = GptProvider(config, PADDED_VOCAB, dtype=dtype)
        mesh = provider.mesh(Layout(), (0,))
        chunks = provider.build(mesh, 0, ranks.groups, device=place)
        with torch.no_grad():
            for name, parameter in provider.local_parameters(chunks, mesh, 0):
                parameter.copy_(weights[name])
        batches = replica_batches(sequences, BatchLimits())
        rows = forward_log_probs(
            chunks,
            batches,
            vocab_size=config.vocab_size,
            temperature=temperature,
            groups=ranks.groups,
            device=place,
        )
    results: Results = {}
    for batch, log_probs_BS in zip(batches, rows, strict=True):
        for row, index in enumerate(batch.sequences):
            results[f"trainer/{index}"] = log_probs_BS[row, len(PROMPTS[index]) : len(sequences[index])]
            results[f"engine/{index}"] = np.array(finished[str(index)].response.log_probs, dtype=np.float32)
    return results
