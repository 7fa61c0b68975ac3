"""The model as SGLang is told of it: a Hugging Face config and tensors, and the names of what it holds. Pure.

SGLang takes the tensors of a Hugging Face checkpoint and fuses them: queries, keys and values, gate and up, with zeros
where it pads: vocabulary rows, on a CPU the MLP's width too. Invariants: a Megatron tensor becomes one tensor that
SGLang holds; padding rows past the vocabulary are not sent.
"""

from __future__ import annotations

from typing import Any

import torch

from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.elastic.plan.parameters import Parameter
from tidegate.huggingface.families import config_of
from tidegate.huggingface.names import tensors_of
from tidegate.huggingface.served import check_served
from tidegate.model_config import ModelConfig

SPARE_POSITIONS = 8
"""SGLang keeps a few positions of its context for itself: with none to spare the longest request would end early."""
VOCABULARY_MULTIPLE = 64
"""To which SGLang pads its vocabulary tables at tensor parallel size 1."""
MLP_MULTIPLE = 32
"""To which SGLang on a CPU pads the width of the MLP."""

_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""The first tensor of what SGLang fuses -> what it calls it."""


def served_config(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """What `config.json` says of the model. ValueError for one that SGLang is not given."""
    check_served(model)
    return config_of(model, dtype=dtype) | {
        "max_position_embeddings": model.max_seq_len + SPARE_POSITIONS,
        # The architecture's default would end responses at some token; the stop token comes with each request.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def held_name(parameter: Parameter, model: ModelConfig) -> str:
    """Under which SGLang holds it."""
    name = tensors_of(parameter, model)[0].name
    for first, fused in _FUSED.items():
        name = name.replace(f".{first}.", f".{fused}.")
    return name


def pieces_of(parameter: Parameter, model: ModelConfig, tensor: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    """A whole tensor as those of a Hugging Face checkpoint."""
    return tuple(
        (piece.name, torch.cat([tensor[rows.first : rows.first + rows.size] for rows in piece.rows]))
        for piece in tensors_of(parameter, model)
    )


def as_held(name: str, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What SGLang on a CPU makes of a Megatron tensor's pieces: fused and padded."""
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
