"""The index of a Megatron `torch_dist` checkpoint: which tensors it holds, in which chunks, and where each lies.

The index (`.metadata`) is a pickle of torch's. It is read by an unpickler that imports nothing: each class that an
index is made of is stood in for by one that only keeps fields, and a file that names anything else is refused, with its
name. Invariant: every chunk of an opened index lies within a file that is there.
"""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - the format is a pickle; `_IndexUnpickler` makes no object but those it names
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

FORMAT_FILE = "metadata.json"
INDEX_FILE = ".metadata"
FORMAT = "torch_dist"
DAMAGES = (ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError)
"""What a pickle that is cut or altered raises, or values of other types than an index has."""


class _Entry:
    """Stands in for a class of torch's: the fields that were saved, whatever it was made with."""

    def __new__(cls, *_: object) -> _Entry:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        """Of an enum or a path, the value is of no interest."""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


_STAND_INS: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType(
    {
        ("builtins", "set"): set,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): tuple,
        **{
            (module, name): _Entry
            for module, names in {
                "pathlib": ("PosixPath",),
                "torch": ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"),
                "torch.serialization": ("_get_layout",),
                "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
                "torch.distributed.checkpoint.metadata": (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                ),
                # Megatron keeps the plans of the save beside the index.
                "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
            }.items()
            for name in names
        },
    }
)


class TorchDistRefused(ValueError):
    """A folder that is no `torch_dist` checkpoint, is damaged, or is of another model."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor: `size_bytes` of a file, as torch.save writes a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def open_index(folder: Path) -> Mapping[str, StoredTensor]:
    """Every tensor of the checkpoint by its key; none is read. Raises TorchDistRefused."""
    try:
        said = json.loads((folder / FORMAT_FILE).read_text())
        if said.get("sharded_backend") != FORMAT:
            raise TorchDistRefused(
                f"{folder}: sharded_backend={said.get('sharded_backend')!r} is not supported, only {FORMAT!r}: save "
                "the checkpoint with --ckpt-format torch_dist"
            )
        with (folder / INDEX_FILE).open("rb") as stream:
            return MappingProxyType(_tensors(folder, _IndexUnpickler(stream).load()))
    except TorchDistRefused as error:
        raise TorchDistRefused(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
    except OSError as error:
        raise TorchDistRefused(
            f"{folder}: {error.filename and Path(error.filename).name}: {error.strerror}; give the folder of one saved "
            f"iteration, which holds {FORMAT_FILE} and {INDEX_FILE}"
        ) from error
    except DAMAGES as error:
        raise TorchDistRefused(f"{folder}: its index is damaged ({error}): fetch it again") from error


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        raise TorchDistRefused(
            f"{INDEX_FILE} names {module}.{name}, which is no entry of an index and is not loaded: take a checkpoint "
            "from whom you trust, saved by Megatron"
        )


def _tensors(folder: Path, index: Any) -> dict[str, StoredTensor]:
    # Of what is no tensor there is no offset.
    places = {
        (str(entry.fqn), _numbers(getattr(entry, "offset", None) or ())): place
        for entry, place in index.storage_data.items()
    }
    sizes = {name: _size_of(folder, name) for name in sorted({str(place.relative_path) for place in places.values()})}
    tensors: dict[str, StoredTensor] = {}
    for key, entry in index.state_dict_metadata.items():
        # What is no tensor has none.
        if hasattr(entry, "chunks"):
            chunks = tuple(_chunk(folder, str(key), chunk, places, sizes) for chunk in entry.chunks)
            tensors[str(key)] = StoredTensor(_numbers(entry.size), chunks)
    return tensors


def _size_of(folder: Path, name: str) -> int:
    if Path(name).name != name:
        raise TorchDistRefused(f"{INDEX_FILE} names {name!r}, which is not a file beside it")
    if not (folder / name).is_file():
        raise TorchDistRefused(f"{name} is missing: fetch it again")
    return (folder / name).stat().st_size


def _chunk(
    folder: Path, key: str, chunk: Any, places: Mapping[tuple[str, tuple[int, ...]], Any], sizes: Mapping[str, int]
) -> StoredChunk:
    offsets = _numbers(chunk.offsets)
    place = places[key, offsets]
    file, (start, size_bytes) = str(place.relative_path), _numbers((place.offset, place.length))
    if start + size_bytes > sizes[file]:
        raise TorchDistRefused(
            f"{folder / file}: {sizes[file]} bytes, {key} ends at byte {start + size_bytes}: it is truncated; fetch it "
            "again"
        )
    return StoredChunk(offsets, _numbers(chunk.sizes), folder / file, start, size_bytes)


def _numbers(found: Any) -> tuple[int, ...]:
    """Counts and places, none below 0."""
    numbers = tuple(found)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} for numbers of 0 or more")
    return numbers
