"""Opens a Megatron `torch_dist` checkpoint and checks it against the model that starts from it. It reads no tensor.

- Megatron saves a kind of a layer's parameters as one tensor, with an axis for the layers (and one for the experts) in
  front; or as one tensor per layer. Both are found.
- Transformer Engine's norms have the names of the layers that they are fused into. They are found too.

Invariant: an opened checkpoint has every parameter of the model, in its shape, and no other weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import gt
from pathlib import Path
from types import MappingProxyType

from tidegate.elastic.plan.parameters import Parameter, Vocabulary
from tidegate.megatron.torch_dist_index import StoredTensor, TorchDistRefused, open_index

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_MODEL = ("embedding.", "decoder.", "output_layer.")
"""The beginnings of weights' keys. Other keys belong to the optimizer."""
_NO_WEIGHT = "_extra_state"
"""The fp8 state of Transformer Engine's layers."""
_MOST_NAMES_SHOWN = 4
_PADDED_TO = 128
"""Megatron pads the vocabulary to this many rows per tensor-parallel rank (`--make-vocab-size-divisible-by`)."""
_SPARE_ROWS = 512
"""The rows of a model beyond its tokenizer's ids, before padding. A Qwen2.5 has up to 399 (152064 - 151665)."""
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms, by the names that they have in Transformer Engine's layers."""


@dataclass(frozen=True, slots=True)
class Place:
    """`stored[lead]` is the parameter."""

    stored: StoredTensor
    lead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TorchDistCheckpoint:
    """`places` are by parameter name."""

    folder: Path
    places: Mapping[str, Place]


def open_torch_dist(folder: Path, parameters: Sequence[Parameter]) -> TorchDistCheckpoint:
    """Raises TorchDistRefused unless it is whole, has each of the parameters in its shape, and no other weights."""
    index = open_index(folder)
    num_layers = 1 + max(parameter.place for parameter in parameters if isinstance(parameter.place, int))
    places = {parameter.name: _place(folder, index, parameter, num_layers=num_layers) for parameter in parameters}
    used = {id(place.stored) for place in places.values()}
    extra = sorted(key for key, stored in index.items() if _is_weight(key) and id(stored) not in used)
    if extra:
        raise TorchDistRefused(
            f"{folder}: {len(extra)} tensors do not belong to the configured model, and would be lost: "
            f"{', '.join(extra[:_MOST_NAMES_SHOWN])}"
        )
    return TorchDistCheckpoint(folder, MappingProxyType(places))


def _is_weight(key: str) -> bool:
    return key.startswith(_MODEL) and not key.endswith(_NO_WEIGHT)


def _place(folder: Path, index: Mapping[str, StoredTensor], parameter: Parameter, *, num_layers: int) -> Place:
    tried = list(_candidates(parameter.name))
    for key, lead in tried:
        if key in index:
            place = Place(index[key], lead)
            _check_shape(folder, key, place, parameter, num_layers=num_layers)
            _check_whole(folder, key, place.stored)
            return place
    raise TorchDistRefused(
        f"{folder} has no {parameter.name}, nor {', '.join(key for key, _ in tried[1:])}: it belongs to another model "
        "than the configured one"
    )


def _check_shape(folder: Path, key: str, place: Place, parameter: Parameter, *, num_layers: int) -> None:
    counts = (num_layers, *(() if parameter.expert is None else (parameter.expert.count,)))
    lead, shape = place.stored.shape[: len(place.lead)], place.stored.shape[len(place.lead) :]
    is_table = isinstance(parameter.cut, Vocabulary) and len(shape) == 2
    fits = shape == parameter.shape or (
        is_table and shape[0] >= parameter.shape[0] and shape[1:] == parameter.shape[1:]
    )
    if fits and is_table:
        _check_spare_rows(folder, key, place.stored, vocab_size=parameter.shape[0])
    if not fits or lead != counts[len(counts) - len(lead) :]:
        raise TorchDistRefused(
            f"{folder}: {key} has shape {list(place.stored.shape)}, {parameter.name} has {list(parameter.shape)}: the "
            "configured model is another one"
        )


def _check_spare_rows(folder: Path, key: str, stored: StoredTensor, *, vocab_size: int) -> None:
    """A table of another tokenizer may be larger too, but by more than padding."""
    num_rows, num_parts = stored.shape[0], len({chunk.offsets[:1] for chunk in stored.chunks})
    limit = _PADDED_TO * num_parts + _SPARE_ROWS
    if num_rows - vocab_size >= limit:
        raise TorchDistRefused(
            f"{folder}: {key} has {num_rows} rows, and the model's vocabulary {vocab_size}: {num_rows - vocab_size} "
            f"rows more, where padding of a table saved in {num_parts} parts makes fewer than {limit}. The tokenizer "
            "belongs to another model: set model.tokenizer to the one of the weights"
        )


def _check_whole(folder: Path, key: str, stored: StoredTensor) -> None:
    """Compare the numbers of elements. Whether each element of a shard exists is checked when the shard is filled."""
    shape = stored.shape
    for chunk in stored.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        if not len(ends) == len(chunk.offsets) == len(chunk.sizes) == len(shape) or any(map(gt, ends, shape)):
            raise TorchDistRefused(
                f"{folder}: {key} of shape {list(shape)} has a chunk of shape {list(chunk.sizes)} at "
                f"{list(chunk.offsets)}: its index is damaged; fetch it again"
            )
    num_elements = sum(prod(chunk.sizes) for chunk in stored.chunks)
    if num_elements != prod(shape):
        raise TorchDistRefused(
            f"{folder}: the chunks of {key} have {num_elements} of {prod(shape)} elements: the checkpoint is not "
            "whole; fetch it again"
        )


def _candidates(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Possible keys, with the indices of the axes in front."""
    yield name, ()
    match = _LAYER.fullmatch(name)
    if match is None:
        return
    layer, suffix = int(match[1]), match[2]
    expert = _EXPERT.fullmatch(suffix)
    if expert is not None:
        suffix = f"mlp.experts.experts.{expert[2]}"
    lead = () if expert is None else (int(expert[1]),)
    for each in (suffix, _FUSED.get(suffix)):
        if each is not None:
            yield f"decoder.layers.{each}", (layer, *lead)
            yield f"decoder.layers.{layer}.{each}", lead
