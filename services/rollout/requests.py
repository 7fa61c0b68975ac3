"""Checks whether a model of a given shape can serve a request. Pure. A refusal names the numbers and the legal ones."""

from __future__ import annotations

from services.rollout.engine import GenerationRequest, RequestRefused
from tidegate.model_config import ModelConfig


def check_request(request: GenerationRequest, config: ModelConfig) -> None:
    """Raise RequestRefused unless the request can be served.

    Every token must be in the vocabulary. The longest response must fit the model. At least one token must remain."""
    prompt, sampling, partial = request.prompt_tokens, request.sampling, request.partial
    if not prompt:
        raise RequestRefused(f"request {request.id}: the prompt is empty; it needs at least 1 token")
    for part, tokens in (("prompt", prompt), ("partial", partial.tokens), ("stop", sampling.stop_token_ids)):
        for position, token in enumerate(tokens):
            if not 0 <= token < config.vocab_size:
                raise RequestRefused(
                    f"request {request.id}: {part} token {token} at position {position} is outside the vocabulary "
                    f"of {config.vocab_size}; legal: 0 to {config.vocab_size - 1}"
                )
    longest, room = len(prompt) + sampling.max_new_tokens, config.max_seq_len - len(prompt)
    if longest > config.max_seq_len:
        fits = f"at most {room} new tokens fit this prompt" if room > 0 else "the prompt alone leaves no room"
        raise RequestRefused(
            f"request {request.id}: {len(prompt)} prompt tokens + max_new_tokens {sampling.max_new_tokens} = {longest} "
            f"exceed max_seq_len {config.max_seq_len}; {fits}"
        )
    if len(partial.tokens) >= sampling.max_new_tokens:
        raise RequestRefused(
            f"request {request.id}: its partial has {len(partial.tokens)} tokens of max_new_tokens "
            f"{sampling.max_new_tokens}: no token remains to generate; take it as finished"
        )
    stop = next((token for token in partial.tokens if token in sampling.stop_token_ids), None)
    if stop is not None:
        raise RequestRefused(f"request {request.id}: its partial holds the stop token {stop}: take it as finished")
