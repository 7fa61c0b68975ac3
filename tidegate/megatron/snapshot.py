"""An immutable snapshot of the weights in host memory: a safetensors file an actor rank, checksummed whole.

Writing: each logical parameter once, by the first data-parallel replica; the file appears under its name only when it
is complete. Reading: the file's checksum first, then any shard of any layout, assembled by `MapsRegions`.
Invariants: a file never changes after it has its name; nothing is read from a file whose checksum is not the one
expected; values go through unchanged, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file

from tidegate.checksums import WrittenFile, combined_checksum, file_checksum
from tidegate.megatron.regions import FirstHolder, MapsRegions
from tidegate.megatron.shards import Piece, Shard

_SHARDS = TypeAdapter(dict[str, Shard])


class SnapshotCorrupt(ValueError):
    """A snapshot file is missing, or not what its writer said it is."""


def write_shards(folder: Path, file: str, shards: Iterable[tuple[Shard, torch.Tensor]]) -> WrittenFile:
    """Write one rank's shards as `folder/file`. ValueError when a tensor is not of its shard's local shape."""
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Shard] = {}
    for shard, tensor in shards:
        if tuple(tensor.shape) != shard.local_shape:
            raise ValueError(f"{shard.name}: the tensor is {tuple(tensor.shape)}, its shard {shard.local_shape}")
        # A clone, since tied parameters share memory and safetensors refuses to write that twice.
        tensors[shard.name] = tensor.detach().to("cpu", copy=True).contiguous()
        described[shard.name] = shard
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{file}.partial"
    save_file(tensors, partial, metadata={"shards": _SHARDS.dump_json(described).decode()})
    written = WrittenFile(file=file, size_bytes=partial.stat().st_size, checksum=file_checksum(partial))
    os.rename(partial, folder / file)
    return written


class SnapshotReader:
    """Reads shards out of a snapshot's files on this node.

    Raises SnapshotCorrupt at once when a file is missing, unreadable or of another checksum.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, str], *, mapping: MapsRegions | None = None) -> None:
        self._mapping = mapping or FirstHolder()
        self._paths = [folder / file for file in sorted(checksums)]
        self._shards = [_described_shards(path, checksums[path.name]) for path in self._paths]
        self.checksum = combined_checksum(checksums)

    def names(self) -> tuple[str, ...]:
        """The logical parameters held, in the order in which they are found."""
        return tuple(dict.fromkeys(name for shards in self._shards for name in shards))

    def read_into(self, target: Shard, tensor: torch.Tensor) -> None:
        """Fill a local tensor. Raises RegionsMissing; rows that no piece of the target names are left alone."""
        sources = [shards[target.name] for shards in self._shards if target.name in shards]
        paths = [path for path, shards in zip(self._paths, self._shards, strict=True) if target.name in shards]
        for copy in self._mapping.copies(sources, target):
            with safe_open(paths[copy.source], framework="pt") as opened:
                region = [slice(None)] * len(target.local_shape)
                region[target.dim] = slice(copy.source_start, copy.source_start + copy.size)
                values = opened.get_slice(target.name)[tuple(region)]
            tensor.narrow(target.dim, copy.target_start, copy.size).copy_(values)

    def read_whole(self, name: str) -> torch.Tensor:
        """The logical, unsharded parameter. Raises SnapshotCorrupt when no file holds a part of it."""
        for path, shards in zip(self._paths, self._shards, strict=True):
            if name in shards:
                whole = whole_shard(shards[name])
                with safe_open(path, framework="pt") as opened:
                    tensor = torch.empty(whole.logical_shape, dtype=opened.get_slice(name)[0:0].dtype)
                self.read_into(whole, tensor)
                return tensor
        raise SnapshotCorrupt(f"no file of the snapshot holds {name!r}; it has {', '.join(self.names())}")


def whole_shard(shard: Shard) -> Shard:
    """The shard that is the whole logical parameter, cut along the same dim."""
    size = shard.logical_shape[shard.dim]
    return Shard(shard.name, shard.logical_shape, shard.logical_shape, shard.dim, (Piece(0, 0, size),), replicated=True)


def _described_shards(path: Path, checksum: str) -> dict[str, Shard]:
    if not path.is_file():
        raise SnapshotCorrupt(f"snapshot file {path} is missing; its version was dropped or never arrived")
    if (found := file_checksum(path)) != checksum:
        raise SnapshotCorrupt(f"snapshot file {path} has checksum {found}, its writer said {checksum}: fetch it again")
    with safe_open(path, framework="pt") as opened:
        return _SHARDS.validate_json(opened.metadata()["shards"])
