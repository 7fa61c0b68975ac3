"""A full set of weights as SGLang takes it: cast, in buckets, with the checksums that it must tell afterwards.

The set is complete before the first bucket leaves, so that a refusal changes nothing. A bucket is what SGLang's own
sender makes: a pickle of names and tensors in base64. It is written here and read there (by SGLang's restricted
unpickler); nothing of that kind is ever read here.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import pickle  # noqa: TID251 # SGLang's wire form of a tensor; written for it and never read
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType

import torch

from services.rollout.engine import WeightsRefused
from services.rollout.full_set import full_set
from services.rollout.sglang.names import as_held, pieces_of
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

BUCKET_BYTES = 64 << 20
"""Of tensors in one request, which base64 makes a third larger; a tensor that is larger goes alone."""

Piece = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightSet:
    """By Megatron name the pieces, with Hugging Face names, that SGLang makes its tensor of."""

    version: int
    named: Mapping[str, tuple[Piece, ...]]

    @property
    def pieces(self) -> Iterator[Piece]:
        return itertools.chain.from_iterable(self.named.values())

    def checksums(self) -> dict[str, str]:
        """By Megatron name, of what SGLang holds in a CPU's memory once it has all pieces."""
        return {
            name: held_checksum(as_held(name, tuple(tensor for _, tensor in pieces)))
            for name, pieces in self.named.items()
        }

    def buckets(self, max_bytes: int = BUCKET_BYTES) -> Iterator[str]:
        for bucket in _bucketed(self.pieces, max_bytes):
            yield base64.b64encode(pickled(bucket)).decode()


class _Pickler(pickle._Pickler):
    """Names the function that reads a storage as torch does: Megatron puts one of its own there, which SGLang blocks.

    In Python, since the pickler in C compares what a name stands for; its types leave out what a subclass needs.
    """

    dispatch = pickle._Pickler.dispatch.copy()

    def save_function(self, obj: FunctionType) -> None:
        if obj is vars(torch.storage)["_load_from_bytes"]:
            self.write(pickle.GLOBAL + b"torch.storage\n_load_from_bytes\n")  # type: ignore[attr-defined] # as above
        else:
            self.save_global(obj)  # type: ignore[attr-defined] # as above

    dispatch[FunctionType] = save_function  # type: ignore[assignment] # as above


def pickled(bucket: list[Piece]) -> bytes:
    written = io.BytesIO()
    _Pickler(written).dump(bucket)
    return written.getvalue()


def weight_set(
    config: ModelConfig, *, version: int, dtype: torch.dtype, tensors: Iterable[tuple[str, torch.Tensor]]
) -> WeightSet:
    """Take a full set of Megatron tensors. WeightsRefused as `full_set` says, or of a tensor that holds no numbers."""
    parameters = {parameter.name: parameter for parameter in model_parameters(config, padded_vocab=config.vocab_size)}

    def prepare(name: str, tensor: torch.Tensor) -> tuple[Piece, ...]:
        if not tensor.is_floating_point():
            raise WeightsRefused(f"tensor {name!r} is {tensor.dtype}; weights are floating point: cast it")
        return pieces_of(parameters[name], config, tensor.detach().to(device="cpu", dtype=dtype))

    return WeightSet(version, full_set(config, version=version, tensors=tensors, prepare=prepare))


def held_checksum(tensor: torch.Tensor) -> str:
    """As SGLang's /weights_checker tells it of a tensor in a CPU's memory: the first 64 bits of SHA-256, in hex."""
    elements = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(elements.numpy().data).hexdigest()[:16]


def _bucketed(pieces: Iterable[Piece], max_bytes: int) -> Iterator[list[Piece]]:
    bucket: list[Piece] = []
    size_bytes = 0
    for name, tensor in pieces:
        if bucket and size_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append((name, tensor))
        size_bytes += tensor.nbytes
    if bucket:
        yield bucket
