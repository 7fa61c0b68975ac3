"""The embedded engine computes the model that Hugging Face's Llama computes from the same weights."""

from __future__ import annotations

import pytest
import torch

from services.rollout.engine import SamplingParams
from tests.unit.rollout.against_transformers import PROMPTS, SHAPES, check_greedy_tokens, llama
from tests.unit.rollout.tiny_models import engine_of, request_of, run


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_are_those_of_transformers_generate(shape: str) -> None:
    check_greedy_tokens(SHAPES[shape])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_those_of_a_full_forward_at_the_sampling_temperature(
    shape: str, temperature: float
) -> None:
    config, model = SHAPES[shape], llama(SHAPES[shape])
    prompt = PROMPTS["short"]
    sampling = SamplingParams(max_new_tokens=80, temperature=temperature, top_p=0.8, seed=3)
    response = run(engine_of(config), request_of(prompt=prompt, sampling=sampling))["a"].response
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *response.tokens]])).logits[0, len(prompt) - 1 : -1]
    tokens = torch.tensor(response.tokens).unsqueeze(1)
    want = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, tokens).squeeze(1)
    torch.testing.assert_close(torch.tensor(response.log_probs), want, atol=1e-4, rtol=0)
