"""The announcement of each member of a mesh: which ranges of the optimizer it owns, and where its tensors lie.

A planner needs the ranges of all ranks of both ends, and a reader of shared memory needs the places. Members announce
both once for each mesh and epoch.

Invariants:
- Decoding gives exactly the announcement that was encoded. [test_catalogue: decoded_announcements_equal_the_encoded]
- Nothing that came over a wire is executed, and an incomplete entry is refused.
  [test_catalogue: malformed_announcements_are_refused]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from pydantic import TypeAdapter

from tidegate.elastic.model.memory import Place
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.optimizers import FlatRange, StateKind

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)}


class Extent(NamedTuple):
    """The size of a flat tensor."""

    num_elements: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Announcement:
    """One member's tensors in one mesh."""

    host: str
    ranges: Mapping[str, FlatRange]
    tensors: Mapping[TensorKey, Extent]
    """The order is also the order of their copies."""
    places: Mapping[TensorKey, Place] = field(default_factory=dict)
    """In shared memory; empty where tensors are sent."""
    record: Place | None = None
    """The place of the member's stamp in shared memory."""
    copies: str = ""
    """The file of the copies that the member keeps. Empty without copies, or where they are not in shared memory."""
    kept: str = ""
    """The file that has the member's tensors while the job is suspended. Empty where none is needed or none is shared.
    """


WiredPlace = tuple[str, int, int, str]
_Wired = tuple[
    str, dict[str, FlatRange], list[tuple[str, StateKind, int, str]], list[WiredPlace], WiredPlace | None, str, str
]
_ONE = TypeAdapter(_Wired)
_MESH = TypeAdapter(dict[int, _Wired])


def encode_all(announcements: Mapping[int, Announcement]) -> bytes:
    """Encode the announcements of all ranks of a mesh."""
    return _MESH.dump_json({rank: _wired(entry) for rank, entry in announcements.items()})


def decode_all(payload: bytes) -> dict[int, Announcement]:
    """Inverse of `encode_all`. Raises the errors of `decode`."""
    return {rank: _read(wired) for rank, wired in _MESH.validate_json(payload).items()}


def encode(announcement: Announcement) -> bytes:
    return _ONE.dump_json(_wired(announcement))


def decode(payload: bytes) -> Announcement:
    """Inverse of `encode`. Raises pydantic's ValidationError, or ValueError, on anything else."""
    return _read(_ONE.validate_json(payload))


def _wired(entry: Announcement) -> _Wired:
    tensors = [(name, kind, extent.num_elements, str(extent.dtype)) for (name, kind), extent in entry.tensors.items()]
    places = [wired_place(entry.places[key]) for key in entry.tensors] if entry.places else []
    record = None if entry.record is None else wired_place(entry.record)
    return entry.host, dict(entry.ranges), tensors, places, record, entry.copies, entry.kept


def _read(wired: _Wired) -> Announcement:
    host, ranges, tensors, places, record, copies, kept = wired
    extents = {(name, kind): Extent(size, _dtype(dtype)) for name, kind, size, dtype in tensors}
    return Announcement(
        host,
        ranges,
        extents,
        dict(zip(extents, map(read_place, places), strict=True)) if places else {},
        None if record is None else read_place(record),
        copies,
        kept,
    )


def wired_place(place: Place) -> WiredPlace:
    return place.path, place.offset_bytes, place.num_elements, str(place.dtype)


def read_place(wired: WiredPlace) -> Place:
    path, offset_bytes, num_elements, dtype = wired
    return Place(path, offset_bytes, num_elements, _dtype(dtype))


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"a tensor is announced as {name}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]
