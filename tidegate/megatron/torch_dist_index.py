"""The index of a Megatron `torch_dist` checkpoint: its tensors, their chunks, and the place of each chunk.

The index (`.metadata`) is a pickle of torch's. An unpickler that imports nothing reads it: each class of an index has a
stand-in that only keeps fields. A file that names any other class is refused, with the class's name.

Invariant: every chunk of an opened index lies within an existing file.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - the format is a pickle; `_IndexUnpickler` makes no object but those it names
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidegate.json_text import parse_json

FORMAT_FILE = "metadata.json"
INDEX_FILE = ".metadata"
FORMAT = "torch_dist"
DAMAGES = (ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError)
"""The errors of a pickle that is cut or altered, or whose values have unexpected types."""


class _Entry:
    """A stand-in for a class of torch's: it has the saved fields and accepts any arguments."""

    def __new__(cls, *_: object) -> _Entry:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        """The value of an enum or a path is not needed."""

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
                # Megatron saves its plans of the save together with the index.
                "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
            }.items()
            for name in names
        },
    }
)


class TorchDistRefused(ValueError):
    """A folder is not a `torch_dist` checkpoint, is damaged, or belongs to another model."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor: `size_bytes` of a file, in the format of torch.save."""

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
    """Every tensor of the checkpoint by its key; no tensor is read. Raises TorchDistRefused."""
    try:
        head = parse_json((folder / FORMAT_FILE).read_bytes())
        if head.get("sharded_backend") != FORMAT:
            raise TorchDistRefused(
                f"{folder}: sharded_backend={head.get('sharded_backend')!r} is not supported, only {FORMAT!r}: save "
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
            f"{INDEX_FILE} names {module}.{name}, which is not an entry of an index and is not loaded: take a "
            "checkpoint from a source that you trust, saved by Megatron"
        )


def _tensors(folder: Path, index: Any) -> dict[str, StoredTensor]:
    # Entries that are not tensors have no offset.
    places = {
        (str(entry.fqn), _numbers(getattr(entry, "offset", None) or ())): place
        for entry, place in index.storage_data.items()
    }
    sizes = {name: _size_of(folder, name) for name in sorted({str(place.relative_path) for place in places.values()})}
    tensors: dict[str, StoredTensor] = {}
    for key, entry in index.state_dict_metadata.items():
        # Entries that are not tensors have no chunks.
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
        raise ValueError(f"{numbers!r} are not numbers of 0 or more")
    return numbers
