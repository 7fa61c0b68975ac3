"""A full set of weights in SGLang's form: cast, in buckets, with the checksums that SGLang must report afterwards.

The set is complete before the first bucket is sent, so a refusal changes nothing. A bucket has the form of SGLang's own
sender: a pickle of names and tensors in base64. This process only writes pickles and never reads one; SGLang reads them
with its restricted unpickler.
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
from services.rollout.full_weights import full_weights
from services.rollout.sglang.names import as_held, pieces_of
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

BUCKET_BYTES = 64 << 20
"""The tensor bytes in one request, which base64 makes a third larger. A larger tensor is sent alone."""

Piece = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The pieces of each tensor that SGLang holds, with Hugging Face names, by Megatron name."""

    version: int
    named: Mapping[str, tuple[Piece, ...]]

    @property
    def pieces(self) -> Iterator[Piece]:
        return itertools.chain.from_iterable(self.named.values())

    def checksums(self) -> dict[str, str]:
        """The checksums, by Megatron name, of the tensors that SGLang holds in a CPU's memory after an update."""
        return {
            name: held_checksum(as_held(name, tuple(tensor for _, tensor in pieces)))
            for name, pieces in self.named.items()
        }

    def buckets(self, max_bytes: int = BUCKET_BYTES) -> Iterator[str]:
        for bucket in _bucketed(self.pieces, max_bytes):
            yield base64.b64encode(pickled(bucket)).decode()


class _Pickler(pickle._Pickler):
    """Writes torch's own name for the function that reads a storage.

    Megatron replaces that function with one that SGLang blocks. This must be the pickler in Python: the one in C checks
    that a name refers to the object. The type stubs lack the members that a subclass needs.
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
    """Take a full set of Megatron tensors.

    Raises WeightsRefused as `full_weights`, and for tensors that are not floats."""
    parameters = {parameter.name: parameter for parameter in model_parameters(config, padded_vocab=config.vocab_size)}

    def prepare(name: str, tensor: torch.Tensor) -> tuple[Piece, ...]:
        if not tensor.is_floating_point():
            raise WeightsRefused(f"tensor {name!r} is {tensor.dtype}; weights are floating point: cast it")
        return pieces_of(parameters[name], config, tensor.detach().to(device="cpu", dtype=dtype))

    return WeightSet(version, full_weights(config, version=version, tensors=tensors, prepare=prepare))


def held_checksum(tensor: torch.Tensor) -> str:
    """The checksum that SGLang's /weights_checker reports of a tensor in CPU memory: 64 bits of SHA-256, in hex."""
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
