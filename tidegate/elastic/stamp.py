"""Which update a rank's tensors are of, written beside them so that it survives the rank.

Two counts in memory: the update that was begun to be applied, and the one that is. Invariant: they are equal exactly
when the tensors are those of that update, whole; between the two writes the tensors are of no update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tidegate.elastic.memory import ArenaReader, Place

NUM_COUNTS = 2


class Stamp:
    """Over a tensor of NUM_COUNTS int64 in the memory of the tensors it is about."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts = counts

    def set(self, num_updates: int) -> None:
        """The tensors are of this update."""
        self.counts.fill_(num_updates)

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Around what changes the tensors from one update to the next; an exception leaves them of no update."""
        self.counts[0] += 1
        yield
        self.counts[1] += 1

    @property
    def num_updates(self) -> int | None:
        """None: an update was interrupted while it was applied."""
        return _whole(*self.counts.tolist())


def read(reader: ArenaReader, place: Place) -> int | None:
    """Another rank's, as `Stamp.num_updates`. Raises FileNotFoundError where its memory is gone."""
    begun, applied = reader.array_at(place).view("i8").tolist()
    return _whole(begun, applied)


def _whole(begun: int, applied: int) -> int | None:
    return applied if begun == applied else None
