"""Where each sequence is and how long, as columns: thousands of them are read at every decision.

Invariant: a sequence that runs has the number of its engine for a place and the step at which it would have had no
token for a start; any other has one of `observed`'s constants for a place and its tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from services.scheduler.state.observed import AWAY, ENDED, QUEUED, Ints


@dataclass(frozen=True, slots=True)
class Columns:
    """By sequence; written by the rollout and its engines, each what it changes."""

    places: Ints
    starts: Ints
    tokens: Ints

    @staticmethod
    def of(num_sequences: int) -> Columns:
        """All queued, nothing generated."""
        return Columns(
            places=np.full(num_sequences, QUEUED, dtype=np.int64),
            starts=np.zeros(num_sequences, dtype=np.int64),
            tokens=np.zeros(num_sequences, dtype=np.int64),
        )

    def run(self, index: int, *, engine: int, start: int) -> None:
        self.places[index], self.starts[index] = engine, start

    def stop(self, index: int, *, tokens: int) -> None:
        """Off its engine, on its way to somewhere else."""
        self.places[index], self.tokens[index] = AWAY, tokens

    def queue(self, indices: Iterable[int]) -> None:
        self.places[list(indices)] = QUEUED

    def end(self, index: int) -> None:
        self.places[index] = ENDED

    def seen(self, steps: Mapping[int, int]) -> tuple[Ints, Ints]:
        """(lengths, places) now, a running one's place counted in the order of `steps`: by engine, the steps that it
        has made."""
        most = max(steps, default=-1) + 1
        step_of, order_of = np.zeros(most + 1, dtype=np.int64), np.zeros(most + 1, dtype=np.int64)
        names = np.fromiter(steps, dtype=np.int64, count=len(steps))
        step_of[names] = np.fromiter(steps.values(), dtype=np.int64, count=len(steps))
        order_of[names] = np.arange(len(steps))
        runs = self.places >= 0
        name_of = np.where(runs, self.places, most)
        lengths = np.where(runs, step_of[name_of] - self.starts, self.tokens)
        return lengths, np.where(runs, order_of[name_of], self.places)
