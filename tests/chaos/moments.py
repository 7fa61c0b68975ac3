"""When a fault strikes: after an event of the job, and a delay.

Pure. The events are rows of the job's `events.jsonl`, as they are in the file: the wire schema is not asked.

Invariant: a moment comes once, and stays. [test_chaos_plan: a_moment_stays]
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
_PHASES = {"warming": "warm_up", "generating": "generate", "scoring": "score", "training": "train"}
_MOST: dict[str, int] = {
    "instance_joined": 6,
    "lead_elected": 3,
    "warming": 1,
    "weights_published": 3,
    "weights_loaded": 4,
    "generating": 3,
    "training": 3,
    "iteration_reported": 6,
    "checkpoint_saved": 2,
    "gpus_acquired": 3,
    "gpus_released": 3,
    "layout_committed": 3,
}
"""The largest number that is drawn of each: a short job has as many."""
_OF_MOVES = ("gpus_acquired", "gpus_released", "layout_committed")
_MOST_MOVES = 12
"""The same of these, where GPUs move."""
EVENTS = tuple(_MOST)
_WEIGHTS = [4 if event in ("generating", "training") else 1 for event in EVENTS]
_LONGEST_DELAY_S = 3.0


@dataclass(frozen=True, slots=True)
class Moment:
    """`delay_s` after the nth event of a kind. Of progress the first event of each iteration counts."""

    event: str
    nth: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.delay_s:g} s after {self.event} {self.nth}"

    def is_reached(self, rows: Sequence[Row]) -> bool:
        return len({key for row in rows if (key := _key(row, self.event)) is not None}) >= self.nth


def drawn_moment(rng: random.Random, *, iterations: int, moves_gpus: bool) -> Moment:
    (event,) = rng.choices(EVENTS, weights=_WEIGHTS)
    most = iterations if event in ("generating", "training") else _MOST[event]
    if moves_gpus and event in _OF_MOVES:
        most = _MOST_MOVES
    delay_s = rng.choice([0.0, 0.0, round(rng.uniform(0.0, _LONGEST_DELAY_S), 2)])
    return Moment(event, rng.randint(1, most), delay_s)


def _key(row: Row, event: str) -> str | None:
    """What makes the row count as one more of the kind. None where it is of another kind."""
    if event not in _PHASES:
        return str(row["id"]) if event in row else None
    progress = row.get("progress")
    if progress is None or progress.get("phase") != _PHASES[event]:
        return None
    num_done, num_total = int(progress.get("num_done", 0)), int(progress.get("num_total", 0))
    return str(row.get("iteration", 0)) if event == "warming" or 0 < num_done < num_total else None
