"""The progress of a job, carried besides its tensors through every reshard, death and checkpoint.

Random numbers are not part of it: `rng` derives them from the seed, the number of updates and the coordinates.

Invariant: between two updates all ranks that hold the state hold the same progress.
[test_training_after_switch: progress_and_the_cursor_follow]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class Progress:
    num_updates: int = 0
    """The updates that the optimizer committed."""
    num_samples: int = 0
    """The samples trained on. The learning rate is a function of it."""
    cursor: Mapping[str, JsonValue] = field(default_factory=dict)
    """The caller's place in its data, in the caller's own format."""
