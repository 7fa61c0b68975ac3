"""Reads a rank's part of a checkpoint's weights, slice by slice, into the rank's tensors.

Files are mapped, not loaded: a rank touches only the bytes of its own slices, one parameter at a time. Values are cast
to the target's dtype. A target dtype that is wider than the checkpoint's keeps them exactly.

Invariant: elements outside the parameter (padding rows of the vocabulary) are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from tidegate.elastic.plan.parameters import Parameter, Piece, Shard
from tidegate.huggingface.checkpoint import HuggingFaceCheckpoint
from tidegate.huggingface.names import EMBEDDING_TENSOR, OUTPUT_TENSOR, TensorOf, tensors_of
from tidegate.huggingface.tensor_file import TensorFile
from tidegate.huggingface.tied_copy import copy_differs, has_copy, stored_bytes

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """Initial weights from a checkpoint."""

    checkpoint: HuggingFaceCheckpoint

    def fill(self, local: torch.Tensor, parameter: Parameter, shard: Shard) -> None:
        """Fill a rank's tensor with its shard. Raises CheckpointRefused when a tied copy differs from its original."""
        with torch.no_grad():
            local.zero_()
            matrix = local.view(shard.rows, shard.width)
            for tensor in tensors_of(parameter, self.checkpoint.model):
                source = mapped(self.checkpoint.file_of[tensor.name], tensor.name)
                for part in _parts(tensor, parameter, shard):
                    part.copy(source, matrix)
                if tensor.name == EMBEDDING_TENSOR:
                    self._check_copy(source, list(_parts(tensor, parameter, shard)))

    def _check_copy(self, embedding: torch.Tensor, parts: list[_Part]) -> None:
        if not has_copy(self.checkpoint):
            return
        copy = mapped(self.checkpoint.file_of[OUTPUT_TENSOR], OUTPUT_TENSOR)
        if not all(torch.equal(part.of(copy), part.of(embedding)) for part in parts):
            raise copy_differs(self.checkpoint)


def mapped(file: TensorFile, name: str) -> torch.Tensor:
    """A tensor of a file. Only the bytes that are accessed are read."""
    stored = file.tensors[name]
    return torch.frombuffer(stored_bytes(file, name), dtype=DTYPES[stored.dtype]).view(stored.shape)


class _Part(NamedTuple):
    """Rows and columns of a tensor, and their place in the rank's matrix of `shard.rows` rows."""

    rows: slice
    columns: slice | None
    """None: the whole width, stored as one run of elements."""
    target_row: int
    target_columns: slice
    """Columns of the rank's matrix."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.rows] if self.columns is None else tensor[self.rows, self.columns]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        part = self.of(source)
        if self.columns is None:
            target[0, self.target_columns].copy_(part.reshape(-1))
        else:
            target[self.target_row : self.target_row + part.shape[0], self.target_columns].copy_(part)


def _parts(tensor: TensorOf, parameter: Parameter, shard: Shard) -> Iterator[_Part]:
    """The parts of a tensor that are in a shard, run by run."""
    for piece in shard.pieces:
        row = 0
        for run in tensor.rows:
            if shard.rows == 1:
                yield from _of_rows(piece, prod(parameter.shape[1:]), run.first, run.first + run.size, row)
            else:
                columns = slice(piece.logical, piece.logical + piece.size)
                target_columns = slice(piece.local, piece.local + piece.size)
                yield _Part(slice(row, row + run.size), columns, run.first, target_columns)
            row += run.size


def _of_rows(piece: Piece, width: int, first: int, last: int, row: int) -> Iterator[_Part]:
    """The parameter's rows from `first` to `last`, which a tensor has from `row` on, as far as a piece has them."""
    begin = max(first, piece.logical // width)
    end = min(last, (piece.logical + piece.size) // width)
    if begin < end:
        at = piece.local + begin * width - piece.logical
        yield _Part(slice(row + begin - first, row + end - first), None, 0, slice(at, at + (end - begin) * width))
