"""A safetensors file by its header: its tensors and whether it is whole. One tensor is read without reading the others.

The format: 8 bytes of length, that many bytes of JSON (name -> dtype, shape, first and last byte), then the tensors'
bytes. This module checks the header itself, without the `safetensors` package, to report the exact fault of a file and
to write one tensor at a time.

Invariant: the tensors of an opened file are where its header says, and cover the file to its last byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidegate.huggingface.families import CheckpointRefused
from tidegate.json_text import parse_json, whole_number

ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that weights may have, by the format's names."""
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the format. A larger number means a file of another kind, whose first bytes are not a length."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`offset` counts from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """`head` is everything before the first tensor, byte for byte."""

    path: Path
    head: bytes
    tensors: Mapping[str, StoredTensor]
    size_bytes: int


def open_tensor_file(path: Path) -> TensorFile:
    """Raises CheckpointRefused when the file is missing or truncated, is not safetensors, or has dtypes that weights
    cannot have.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as stream:
            length_bytes = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(length_bytes, "little")
            if len(length_bytes) < _LENGTH_BYTES or length > min(size_bytes - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                raise CheckpointRefused(
                    f"{path}: {size_bytes} bytes do not hold a safetensors header, whose length would be {length} "
                    "bytes: it is truncated or of another format; fetch it again"
                )
            header = stream.read(length)
    except OSError as error:
        raise CheckpointRefused(f"{path}: {error.strerror}; fetch the checkpoint's missing files") from error
    tensors = _tensors(path, header, data_begins=_LENGTH_BYTES + length)
    end = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=_LENGTH_BYTES + length)
    if end != size_bytes:
        raise CheckpointRefused(
            f"{path}: its tensors end at byte {end}, the file at byte {size_bytes}: "
            f"{'it is truncated' if size_bytes < end else 'something was added to it'}; fetch it again"
        )
    return TensorFile(path, length_bytes + header, MappingProxyType(tensors), size_bytes)


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, StoredTensor]]:
    """The head of a new file with these tensors (dtype and shape) in order, and the place of each."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEMSIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    # Pad with spaces, which the format allows, so that data begin at a multiple of 8.
    header += b" " * (-len(header) % _LENGTH_BYTES)
    head = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    placed = {
        name: StoredTensor(dtype, shape, len(head) + entries[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return head, placed


def _numbers(found: Any) -> tuple[int, ...]:
    """Counts and places, none below 0."""
    return tuple(whole_number(number, "a size or an offset") for number in found)


def _tensors(path: Path, header: bytes, *, data_begins: int) -> dict[str, StoredTensor]:
    try:
        entries: dict[str, Any] = parse_json(header)
        entries.pop(_METADATA, None)
        found = {
            str(name): (str(entry["dtype"]), _numbers(entry["shape"]), _numbers(entry["data_offsets"]))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRefused(
            f"{path}: its header is not that of a safetensors file ({error}): fetch it again"
        ) from error
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for name, (dtype, shape, offsets) in sorted(found.items(), key=lambda item: item[1][2]):
        if dtype not in ITEMSIZES:
            raise CheckpointRefused(
                f"{path}: tensor {name} is {dtype}; weights are read in {', '.join(ITEMSIZES)}: take the checkpoint in "
                "one of these"
            )
        tensors[name] = StoredTensor(dtype, shape, data_begins + position)
        want = (position, position + tensors[name].size_bytes)
        if offsets != want:
            raise CheckpointRefused(
                f"{path}: tensor {name} of shape {list(shape)} has the byte offsets {offsets}, but belongs at "
                f"{want}: the header is damaged; fetch the file again"
            )
        position = want[1]
    return tensors
