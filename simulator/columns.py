"""The place and the length of each sequence, as columns, since every decision reads thousands of them.

The columns of a running sequence are its engine's number (`places`) and the engine's step at which it would have had no
token (`starts`). Every other sequence has one of the constants of `observed` in `places` and its tokens in `tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from services.scheduler.state.observed import AWAY, ENDED, QUEUED, Ints


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns by sequence. The rollout and its engines write their own changes."""

    places: Ints
    starts: Ints
    tokens: Ints

    @staticmethod
    def of(num_sequences: int) -> Columns:
        """All sequences are queued and have no token."""
        return Columns(
            places=np.full(num_sequences, QUEUED, dtype=np.int64),
            starts=np.zeros(num_sequences, dtype=np.int64),
            tokens=np.zeros(num_sequences, dtype=np.int64),
        )

    def run(self, index: int, *, engine: int, start: int) -> None:
        self.places[index], self.starts[index] = engine, start

    def stop(self, index: int, *, tokens: int) -> None:
        """The sequence leaves its engine for another place."""
        self.places[index], self.tokens[index] = AWAY, tokens

    def queue(self, indices: Iterable[int]) -> None:
        self.places[list(indices)] = QUEUED

    def end(self, index: int) -> None:
        self.places[index] = ENDED

    def snapshot(self, steps: Mapping[int, int]) -> tuple[Ints, Ints]:
        """(lengths, places) now. `steps` has the number of steps of each engine, by the engine's number.

        The place of a running sequence is the position of its engine in `steps`.
        """
        most = max(steps, default=-1) + 1
        step_of, order_of = np.zeros(most + 1, dtype=np.int64), np.zeros(most + 1, dtype=np.int64)
        names = np.fromiter(steps, dtype=np.int64, count=len(steps))
        step_of[names] = np.fromiter(steps.values(), dtype=np.int64, count=len(steps))
        order_of[names] = np.arange(len(steps))
        runs = self.places >= 0
        name_of = np.where(runs, self.places, most)
        lengths = np.where(runs, step_of[name_of] - self.starts, self.tokens)
        return lengths, np.where(runs, order_of[name_of], self.places)
