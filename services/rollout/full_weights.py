"""Checks that tensors are the full weights of a model: each logical Megatron tensor once and whole.

A refusal names the tensors. Rows past the vocabulary in the embedding and the output layer are padding, and optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from services.rollout.engine import WeightsRefused
from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig
from tidegate.short_lists import first_few

Prepared = TypeVar("Prepared")


def full_weights(
    config: ModelConfig,
    *,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    prepare: Callable[[str, torch.Tensor], Prepared],
) -> dict[str, Prepared]:
    """The prepared tensors by name. `prepare` gets one tensor at a time. Raises WeightsRefused, as `prepare` may."""
    want = {parameter.name: parameter.shape for parameter in model_parameters(config, padded_vocab=config.vocab_size)}
    named: dict[str, Prepared] = {}
    for name, tensor in tensors:
        if name not in want:
            raise WeightsRefused(
                f"weights version {version}: unknown tensor {name!r}; this model has {first_few(want)}"
            )
        if name in named:
            raise WeightsRefused(f"weights version {version}: tensor {name!r} came twice; send each once")
        _check_shape(name, tuple(tensor.shape), want[name])
        named[name] = prepare(name, tensor)
    missing = [name for name in want if name not in named]
    if missing:
        raise WeightsRefused(
            f"weights version {version}: {len(missing)} of {len(want)} tensors are missing: {first_few(missing)}; "
            f"an update is a full set"
        )
    return named


def _check_shape(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
    padded = name in (EMBEDDING, OUTPUT) and len(got) == 2 and got[0] >= want[0] and got[1] == want[1]
    if got != want and not padded:
        more = " or more rows" if name in (EMBEDDING, OUTPUT) else ""
        raise WeightsRefused(
            f"tensor {name!r} has shape {list(got)}, want {list(want)}{more}: send it whole, unsharded"
        )
