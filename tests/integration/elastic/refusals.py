"""What the ranks of the tests of refused and aborted reshards run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.elastic.trainers import LEARNING_RATE, logical_state, minibatch, same, started
from tests.ranks import RankContext, Results
from tidegate.elastic.carry.transport import TransferFailed
from tidegate.elastic.model.memory import ArenaFull, SharedArena
from tidegate.elastic.plan.layout import LayoutRefused
from tidegate.elastic.preparing import At, ReshardAborted
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

HOME = Layout(tp=2, dp=2)


def refused(context: RankContext, *, asked: list[dict[str, Any]]) -> Results:
    """What each of the layouts is refused with, and the updates around them."""
    with started(context, HOME) as trainer:
        updates = [_update(trainer)]
        before, num_bytes = logical_state(trainer), _resident_bytes(trainer)
        said = [_said(partial(_go, trainer, place), LayoutRefused) for place in asked]
        untouched = same(before, logical_state(trainer)) and _resident_bytes(trainer) == num_bytes
        updates.append(_update(trainer))
        return {"said": np.array(said), "untouched": np.array(untouched), "updates": np.array(updates)}


def failing(context: RankContext, *, member: int, point: str, target: dict[str, Any], shared: bool) -> Results:
    """One member's memory, or its transfer, fails it once at a point; the updates around, and the switch that works."""
    failures: list[Exception] = []
    if context.rank == member:
        failures.append(ArenaFull("no room") if point == "allocated" else TransferFailed("no bytes"))
    with started(context, HOME, shared=shared, at=_failing_at(point, failures)) as trainer:
        updates = [_update(trainer)]
        _go(trainer, target)
        _go(trainer, {"layout": {"tp": 2, "dp": 2}})
        before, num_bytes = logical_state(trainer), _resident_bytes(trainer)
        said = _said(partial(_go, trainer, target), (ReshardAborted, ArenaFull, TransferFailed))
        kept = same(before, logical_state(trainer))
        given_back = _resident_bytes(trainer) <= num_bytes
        updates.append(_update(trainer))
        _go(trainer, target)
        updates.append(_update(trainer))
        return {
            "said": np.array(said),
            "untouched": np.array([kept, given_back, not failures]),
            "updates": np.array(updates),
        }


def _failing_at(point: str, failures: list[Exception]) -> At:
    """Raises each of the failures once, from the third time on that the point is reached."""
    reached = iter(range(10_000))

    def at(name: str) -> None:
        if name == point and next(reached) >= 2 and failures:
            raise failures.pop()

    return at


def _go(trainer: ElasticTrainer, place: dict[str, Any]) -> None:
    trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))


def _said(call: Callable[[], None], kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _update(trainer: ElasticTrainer) -> tuple[float, float]:
    update = trainer.train_minibatch(minibatch(trainer.progress.num_updates), LEARNING_RATE)
    return (update.sums[0], update.grad_norm) if update is not None else (np.nan, np.nan)


def _resident_bytes(trainer: ElasticTrainer) -> int:
    """Of the pages that all members' arenas hold in shared memory; 0 where theirs are private."""
    state = trainer.state
    if not isinstance(state.arena, SharedArena):
        return 0
    everyone = trainer.world.membership.members
    # The others may still be about to give theirs back.
    trainer.world.barrier(everyone)
    resident = sum(path.stat().st_blocks for path in Path(state.arena.path).parent.iterdir()) * 512
    trainer.world.barrier(everyone)
    return resident
