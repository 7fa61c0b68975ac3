"""Which update a rank's tensors are of, and how the job went on there, kept beside them so that it survives the rank.

A record of RECORD_BYTES: two notes, then three counts: the update that was begun to be applied, the one that is, and
which note is the last. Invariants: the counts of updates are equal exactly when the tensors are those of that update,
whole; between the two writes the tensors are of no update; the last note is whole, and there before its update counts
as applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from pydantic import TypeAdapter

from tidegate.elastic.model.memory import ArenaReader, Place
from tidegate.elastic.model.param_groups import GroupValues
from tidegate.elastic.state.progress import Progress

_NOTE_BYTES = 32 << 10
"""Two parameter groups take 2 KB; what is left is for the caller's place in its data."""
_COUNTS_BYTES = 24
RECORD_BYTES = 2 * _NOTE_BYTES + _COUNTS_BYTES


@dataclass(frozen=True, slots=True)
class Note:
    """What goes with the tensors of one update."""

    progress: Progress = field(default_factory=Progress)
    groups: tuple[GroupValues, ...] = ()
    """Of the optimizer, as `param_groups` reads them."""


_NOTE = TypeAdapter(Note)


class Stamp:
    """Over RECORD_BYTES of host memory, zeroed or written by another Stamp."""

    def __init__(self, record: torch.Tensor) -> None:
        assert record.nbytes == RECORD_BYTES
        self.record = record
        # Last, since what arrives from another rank is complete once its end is.
        self._counts = record[-_COUNTS_BYTES:].view(torch.int64)

    def set(self, note: Note) -> None:
        """The tensors are of this update."""
        with self.writing(note):
            pass

    @contextmanager
    def writing(self, note: Note) -> Iterator[None]:
        """Around what makes the tensors those of the note's update, whatever they were."""
        self.spoil()
        yield
        self._write(note)
        self._counts[:2] = note.progress.num_updates

    @contextmanager
    def applying(self, note: Callable[[], Note]) -> Iterator[None]:
        """Around what changes the tensors from one update to the next, with the next one's note once it is applied; an
        exception leaves them of no update."""
        self._counts[0] += 1
        yield
        self._write(note())
        self._counts[1] += 1

    def spoil(self) -> None:
        """The tensors are of no update."""
        self._counts[0] = -1
        self._counts[1] = -2

    def renote(self, note: Note) -> None:
        """The note of the same update has changed."""
        self._write(note)

    def read(self) -> Note | None:
        """The note of the tensors; None: they were never written, or what wrote them was interrupted."""
        begun, applied, last = self._counts.tolist()
        if begun != applied:
            return None
        area = self._area(last)
        size = int(area[:8].view(torch.int64))
        # A copy, for a storage that numpy has seen cannot be given back.
        return _NOTE.validate_json(area[8 : 8 + size].clone().numpy().tobytes()) if size else None

    def _write(self, note: Note) -> None:
        text = encoded(note)
        other = 1 - int(self._counts[2])
        area = self._area(other)
        area[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        area[:8].view(torch.int64).fill_(len(text))
        self._counts[2] = other

    def _area(self, index: int) -> torch.Tensor:
        start = index * _NOTE_BYTES
        return self.record[start : start + _NOTE_BYTES]


def encoded(note: Note) -> bytes:
    """As it is written. ValueError when a record has no room for it, or what the caller gave is no JSON."""
    text = _NOTE.dump_json(note)
    if len(text) > _NOTE_BYTES - 8:
        raise ValueError(
            f"progress and parameter groups take {len(text)} bytes as JSON, and a rank's record has room for "
            f"{_NOTE_BYTES - 8}: keep a shorter cursor"
        )
    return text


def read_at(reader: ArenaReader, place: Place) -> Note | None:
    """Another rank's, as `Stamp.read`; None too where its memory is gone."""
    try:
        return Stamp(reader.tensor_at(place)).read()
    except FileNotFoundError:
        return None
