"""The embedded engine generates the same tokens as transformers, for every model family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import SamplingParams
from tests.hugging_face import CONFIGS, save
from tests.unit.rollout.tiny_models import request_of, run
from tidegate.elastic.plan.parameters import shard_of
from tidegate.huggingface.checkpoint import HuggingFaceCheckpoint, open_checkpoint
from tidegate.huggingface.checkpoint_weights import CheckpointWeights
from tidegate.megatron.family import model_parameters

PROMPTS = {"one token": [9], "short": [5, 17, 3, 3, 41], "over a block of keys": [(7 * i) % 61 for i in range(90)]}


def weights_of(checkpoint: HuggingFaceCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter in model_parameters(checkpoint.model, padded_vocab=checkpoint.model.vocab_size):
        tensor = torch.empty(parameter.shape)
        CheckpointWeights(checkpoint).fill(tensor, parameter, shard_of(parameter.shape, parameter.cut, tp=1, tp_rank=0))
        yield parameter.name, tensor


def loaded(folder: Path, name: str) -> tuple[EmbeddedEngine, Any]:
    """The engine, and the transformers model with the same weights."""
    model = save(folder, name)
    checkpoint = open_checkpoint(folder)
    engine = EmbeddedEngine(replace(checkpoint.model, max_seq_len=160), max_running_requests=4)
    engine.update_weights(1, weights_of(checkpoint))
    return engine, model


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    engine, model = loaded(tmp_path, name)
    sampling = SamplingParams(max_new_tokens=40, temperature=0)
    requests = [request_of(which, prompt=prompt, sampling=sampling) for which, prompt in PROMPTS.items()]
    finished = run(engine, *requests)
    for which, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        response = finished[which].response
        assert response.tokens == tuple(output[0, len(prompt) :].tolist()), which
        with torch.inference_mode():
            logits = model(output).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(response.tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(response.log_probs), want, atol=1e-4, rtol=0)
