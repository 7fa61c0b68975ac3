"""What a job carries besides its tensors, through every reshard, death and checkpoint.

Random numbers are not among it: `rng` makes them from the seed, the count of updates and the coordinates.
Invariant: all ranks that hold the state hold the same progress between two updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class Progress:
    num_updates: int = 0
    """Committed by the optimizer."""
    num_samples: int = 0
    """Trained on; the learning rate is a function of it."""
    cursor: Mapping[str, JsonValue] = field(default_factory=dict)
    """The caller's place in its data, in words of its own."""
