"""The model in SGLang's terms: a Hugging Face config, its tensors, and the names of the tensors that SGLang holds.

Pure.

SGLang takes the tensors of a Hugging Face checkpoint and fuses some: queries, keys and values; gate and up. It pads
vocabulary rows with zeros, and on a CPU also the MLP's width.

Invariants:
- A Megatron tensor becomes one tensor that SGLang holds. [test_sglang_values: held_name_of_its_own]
- Padding rows past the vocabulary are not sent. [test_sglang_values: padding_rows_are_not_sent]
"""

from __future__ import annotations

from typing import Any

import torch

from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.elastic.plan.parameters import Parameter
from tidegate.huggingface.families import config_of
from tidegate.huggingface.names import tensors_of
from tidegate.huggingface.sglang_support import check_servable
from tidegate.model_config import ModelConfig

SPARE_POSITIONS = 8
"""SGLang reserves a few positions of its context. Without spare ones, the longest request would end early."""
VOCABULARY_MULTIPLE = 64
"""SGLang pads its vocabulary tables to a multiple of this, at tensor parallel size 1."""
MLP_MULTIPLE = 32
"""SGLang on a CPU pads the width of the MLP to a multiple of this."""

_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""The first of the tensors that SGLang fuses -> the fused tensor's name."""


def served_config(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The model's `config.json`. Raises ValueError for a model that SGLang cannot serve."""
    check_servable(model)
    return config_of(model, dtype=dtype) | {
        "max_position_embeddings": model.max_seq_len + SPARE_POSITIONS,
        # Without these, the architecture's default token would end responses. Each request has its own stop token.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def held_name(parameter: Parameter, model: ModelConfig) -> str:
    """The name under which SGLang holds the parameter."""
    name = tensors_of(parameter, model)[0].name
    for first, fused in _FUSED.items():
        name = name.replace(f".{first}.", f".{fused}.")
    return name


def pieces_of(parameter: Parameter, model: ModelConfig, tensor: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    """The tensors of a Hugging Face checkpoint that make up a whole Megatron tensor."""
    return tuple(
        (piece.name, torch.cat([tensor[rows.first : rows.first + rows.size] for rows in piece.rows]))
        for piece in tensors_of(parameter, model)
    )


def as_held(name: str, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The tensor that SGLang on a CPU makes of a Megatron tensor's pieces: fused and padded."""
    if name in (EMBEDDING, OUTPUT):
        return _padded_rows(pieces[0], VOCABULARY_MULTIPLE)
    if name.endswith("linear_fc1.weight"):
        return torch.cat([_padded_rows(piece, MLP_MULTIPLE) for piece in pieces])
    if name.endswith("linear_fc2.weight"):
        return _padded_rows(pieces[0].T, MLP_MULTIPLE).T
    return torch.cat(pieces)


def _padded_rows(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    num_padding = -len(tensor) % multiple
    return torch.cat((tensor, tensor.new_zeros(num_padding, *tensor.shape[1:])))
