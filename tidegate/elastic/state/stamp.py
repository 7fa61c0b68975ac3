"""A stamp records which update a rank's tensors belong to, and the job's note there. It is kept beside the tensors, so
it survives the rank.

A record of RECORD_BYTES has two notes, then three counts: the update whose application began, the update that is
applied, and the index of the latest note.

Invariants:
- The two counts of updates are equal exactly when the tensors are whole and belong to that update.
  [test_stamp: an_update_counts_once_it_is_applied]
- Between the two writes the tensors belong to no update. [test_stamp: being_overwritten_belong_to_no_update]
- The latest note is whole, and is written before its update counts as applied.
  [test_stamp: a_note_too_long_for_its_record]
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
"""Two parameter groups take 2 KB. The rest is for the caller's place in its data."""
_COUNTS_BYTES = 24
RECORD_BYTES = 2 * _NOTE_BYTES + _COUNTS_BYTES


@dataclass(frozen=True, slots=True)
class Note:
    """The values that belong to the tensors of one update."""

    progress: Progress = field(default_factory=Progress)
    groups: tuple[GroupValues, ...] = ()
    """The values of the optimizer's groups, as `param_groups` reads them."""


_NOTE = TypeAdapter(Note)


class Stamp:
    """Works on RECORD_BYTES of host memory, filled with 0 or written by another Stamp."""

    def __init__(self, record: torch.Tensor) -> None:
        assert record.nbytes == RECORD_BYTES
        self.record = record
        # The counts stand last: a record that arrives from another rank is complete once its end has arrived.
        self._counts = record[-_COUNTS_BYTES:].view(torch.int64)

    def set(self, note: Note) -> None:
        """Record that the tensors belong to this update."""
        with self.writing(note):
            pass

    @contextmanager
    def writing(self, note: Note) -> Iterator[None]:
        """Surrounds code that turns the tensors, whatever they were, into those of the note's update."""
        self.spoil()
        yield
        self._write(note)
        self._counts[:2] = note.progress.num_updates

    @contextmanager
    def applying(self, note: Callable[[], Note]) -> Iterator[None]:
        """Surrounds code that changes the tensors from one update to the next. The next update's note is written once
        it is applied.

        After an exception the tensors belong to no update.
        """
        self._counts[0] += 1
        yield
        self._write(note())
        self._counts[1] += 1

    def spoil(self) -> None:
        """Record that the tensors belong to no update."""
        self._counts[0] = -1
        self._counts[1] = -2

    def renote(self, note: Note) -> None:
        """Change the note of the same update."""
        self._write(note)

    def read(self) -> Note | None:
        """The note of the tensors. None: they were never written, or their writer was interrupted."""
        begun, applied, last = self._counts.tolist()
        if begun != applied:
            return None
        area = self._area(last)
        size = int(area[:8].view(torch.int64))
        # Clone: torch cannot resize a storage that numpy has seen.
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
    """The note as it is written.

    Raises ValueError when a record has no room for it, or when the caller's cursor is not JSON.
    """
    text = _NOTE.dump_json(note)
    if len(text) > _NOTE_BYTES - 8:
        raise ValueError(
            f"progress and parameter groups take {len(text)} bytes as JSON, and a rank's record has room for "
            f"{_NOTE_BYTES - 8}: keep a shorter cursor"
        )
    return text


def read_at(reader: ArenaReader, place: Place) -> Note | None:
    """Another rank's note, as `Stamp.read`. None also where its memory does not exist any more."""
    try:
        return Stamp(reader.tensor_at(place)).read()
    except FileNotFoundError:
        return None
