"""Initial weights from a Megatron `torch_dist` checkpoint, whatever layout saved it.

A rank reads the chunks that overlap its own shards, one after another.

Invariants:
- Every element of a shard is filled, or the checkpoint is refused.
- Padding rows of the vocabulary are 0, however many were saved.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from tidegate.elastic.plan.parameters import Parameter, Shard
from tidegate.megatron.torch_dist_checkpoint import Place, TorchDistCheckpoint
from tidegate.megatron.torch_dist_index import DAMAGES, StoredChunk, TorchDistRefused


@dataclass(frozen=True, slots=True)
class TorchDistWeights:
    """Initial weights from an opened checkpoint."""

    checkpoint: TorchDistCheckpoint

    def fill(self, local: torch.Tensor, parameter: Parameter, shard: Shard) -> None:
        """See InitialWeights. Raises TorchDistRefused when elements are missing, or when a chunk differs from
        the index.
        """
        place = self.checkpoint.places[parameter.name]
        num_filled = 0
        with torch.no_grad():
            local.zero_()
            matrix = local.view(shard.rows, shard.width)
            for chunk in place.stored.chunks:
                overlaps = list(_overlaps(chunk, place, parameter, shard))
                saved = _read(chunk) if overlaps else None
                for target, source in overlaps:
                    assert saved is not None
                    matrix[target].copy_(saved[source].reshape(matrix[target].shape))
                    num_filled += matrix[target].numel()
        num_needed = shard.rows * sum(piece.size for piece in shard.pieces)
        if num_filled != num_needed:
            raise TorchDistRefused(
                f"{self.checkpoint.folder}: {parameter.name}: the chunks hold {num_filled} of {num_needed} elements "
                "that a rank needs: the checkpoint is not whole; fetch it again"
            )


def _overlaps(
    chunk: StoredChunk, place: Place, parameter: Parameter, shard: Shard
) -> Iterator[tuple[tuple[slice, slice], tuple[int | slice, ...]]]:
    """The parts of a shard's matrix that a chunk holds, and their places in the chunk."""
    axes = len(place.lead)
    lead = tuple(at - offset for at, offset in zip(place.lead, chunk.offsets, strict=False))
    if any(not 0 <= at < size for at, size in zip(lead, chunk.sizes, strict=False)):
        return
    offsets, sizes = chunk.offsets[axes:], chunk.sizes[axes:]
    # A parameter with one dim is a matrix with one column.
    (top, left), (height, width) = (*offsets, 0)[:2], (*sizes, 1)[:2]
    inner = prod(parameter.shape[1:])
    for piece in shard.pieces:
        if shard.rows == 1:
            begin = max(piece.logical // inner, top)
            end = min((piece.logical + piece.size) // inner, top + height)
            if begin < end and (left, width) != (0, inner):
                raise TorchDistRefused(f"{parameter.name} was saved in columns of {width}, but is cut by rows here")
            at = piece.local + begin * inner - piece.logical
            target = (slice(0, 1), slice(at, at + (end - begin) * inner))
            source: tuple[int | slice, ...] = (*lead, slice(begin - top, end - top))
        else:
            begin, end = max(piece.logical, left), min(piece.logical + piece.size, left + width)
            at = piece.local + begin - piece.logical
            target = (slice(top, top + height), slice(at, at + end - begin))
            source = (*lead, slice(0, height), slice(begin - left, end - left))
        if begin < end:
            yield target, source


def _read(chunk: StoredChunk) -> torch.Tensor:
    with chunk.file.open("rb") as stream:
        stream.seek(chunk.start)
        saved = io.BytesIO(stream.read(chunk.size_bytes))
    try:
        tensor: torch.Tensor = torch.load(saved, map_location="cpu", weights_only=True)
    except (RuntimeError, *DAMAGES) as error:
        raise TorchDistRefused(f"{chunk.file}: the chunk at byte {chunk.start} is damaged: fetch it again") from error
    if tuple(tensor.shape) != chunk.sizes:
        raise TorchDistRefused(
            f"{chunk.file}: a chunk has shape {list(tensor.shape)}, the index says {list(chunk.sizes)}: fetch it again"
        )
    return tensor
