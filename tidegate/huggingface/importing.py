"""A rank's part of a checkpoint's weights, read slice by slice into the tensors that it holds.

Files are mapped, not loaded: a rank touches the bytes of its own slices, a parameter at a time. Values are cast to the
held tensor's dtype; what is wider than the checkpoint's keeps them exactly. Invariant: what is not the parameter's
(padding rows of the vocabulary) is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from tidegate.elastic.plan.parameters import Parameter, Piece, Shard
from tidegate.huggingface.checkpoint import CONFIG, HuggingFaceCheckpoint
from tidegate.huggingface.families import CheckpointRefused
from tidegate.huggingface.names import EMBEDDING_TENSOR, OUTPUT_TENSOR, TensorOf, tensors_of
from tidegate.huggingface.tensor_file import TensorFile

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The start of a model whose weights come from a checkpoint."""

    checkpoint: HuggingFaceCheckpoint

    def fill(self, local: torch.Tensor, parameter: Parameter, shard: Shard) -> None:
        """Fill a rank's tensor with its shard. CheckpointRefused when a tied copy is not what it is a copy of."""
        with torch.no_grad():
            local.zero_()
            held = local.view(shard.rows, shard.width)
            for tensor in tensors_of(parameter, self.checkpoint.model):
                source = mapped(self.checkpoint.file_of[tensor.name], tensor.name)
                for part in _parts(tensor, parameter, shard):
                    part.copy(source, held)
                if tensor.name == EMBEDDING_TENSOR:
                    self._check_copy(source, list(_parts(tensor, parameter, shard)))

    def _check_copy(self, embedding: torch.Tensor, parts: list[_Part]) -> None:
        copy = _tied_copy(self.checkpoint)
        if copy is not None and not all(torch.equal(part.of(copy), part.of(embedding)) for part in parts):
            raise _of_two_minds(self.checkpoint)


def check_copy(checkpoint: HuggingFaceCheckpoint) -> None:
    """CheckpointRefused when a tied copy is not what it is a copy of. It reads both tensors: once a job, not a rank."""
    copy = _tied_copy(checkpoint)
    if copy is not None and not torch.equal(copy, mapped(checkpoint.file_of[EMBEDDING_TENSOR], EMBEDDING_TENSOR)):
        raise _of_two_minds(checkpoint)


def _tied_copy(checkpoint: HuggingFaceCheckpoint) -> torch.Tensor | None:
    """The output layer that a tied checkpoint keeps beside the embedding; None of most."""
    if not checkpoint.model.tied_embeddings or OUTPUT_TENSOR not in checkpoint.file_of:
        return None
    return mapped(checkpoint.file_of[OUTPUT_TENSOR], OUTPUT_TENSOR)


def _of_two_minds(checkpoint: HuggingFaceCheckpoint) -> CheckpointRefused:
    return CheckpointRefused(
        f"{checkpoint.folder}: {OUTPUT_TENSOR} differs from {EMBEDDING_TENSOR}, which {CONFIG} ties it to "
        "(tie_word_embeddings): set that to false if the model has both"
    )


def mapped(file: TensorFile, name: str) -> torch.Tensor:
    """A tensor of a file, of which only what is looked at is read."""
    stored = file.tensors[name]
    # Copy on write, since torch wants writable memory; nothing writes.
    memory = np.memmap(file.path, dtype=np.uint8, mode="c", offset=stored.offset, shape=(stored.size_bytes,))
    return torch.frombuffer(memory, dtype=DTYPES[stored.dtype]).view(stored.shape)


class _Part(NamedTuple):
    """Rows and columns of a tensor, and where a rank holds them: in its matrix of `shard.rows` rows."""

    rows: slice
    columns: slice | None
    """None: the whole width, and held as one run of elements."""
    held_row: int
    held: slice
    """Columns of the held matrix."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.rows] if self.columns is None else tensor[self.rows, self.columns]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        part = self.of(source)
        if self.columns is None:
            target[0, self.held].copy_(part.reshape(-1))
        else:
            target[self.held_row : self.held_row + part.shape[0], self.held].copy_(part)


def _parts(tensor: TensorOf, parameter: Parameter, shard: Shard) -> Iterator[_Part]:
    """What of a tensor is in a shard, run by run."""
    for piece in shard.pieces:
        row = 0
        for run in tensor.rows:
            if shard.rows == 1:
                yield from _of_rows(piece, prod(parameter.shape[1:]), run.first, run.first + run.size, row)
            else:
                columns = slice(piece.logical, piece.logical + piece.size)
                held = slice(piece.local, piece.local + piece.size)
                yield _Part(slice(row, row + run.size), columns, run.first, held)
            row += run.size


def _of_rows(piece: Piece, width: int, first: int, last: int, row: int) -> Iterator[_Part]:
    """The parameter's rows from `first` up to `last`, which a tensor has from `row` on, as far as a piece has them."""
    begin = max(first, piece.logical // width)
    end = min(last, (piece.logical + piece.size) // width)
    if begin < end:
        at = piece.local + begin * width - piece.logical
        yield _Part(slice(row + begin - first, row + end - first), None, 0, slice(at, at + (end - begin) * width))
