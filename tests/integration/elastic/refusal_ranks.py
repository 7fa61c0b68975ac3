"""The rank processes of the tests of refused and aborted reshards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule

from tests.integration.elastic.trainer_ranks import LEARNING_RATE, logical_state, minibatch, same, started
from tests.ranks import RankContext, Results
from tidegate.checksums import file_checksum
from tidegate.elastic import checkpoints
from tidegate.elastic.carry.transport import TransferFailed
from tidegate.elastic.epoch.joint_step import MemberFailed
from tidegate.elastic.model.memory import ArenaFull, SharedArena
from tidegate.elastic.plan.layout import LayoutRefused, Mesh
from tidegate.elastic.reshard_preparation import OnPoint, ReshardAborted
from tidegate.elastic.state.files import FileCorrupt, StateFiles
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.types import Layout

HOME = Layout(tp=2, dp=2)


def refused(context: RankContext, *, places: list[dict[str, Any]]) -> Results:
    """The error of each layout, and the updates before and after."""
    with started(context, HOME) as trainer:
        updates = [_update(trainer)]
        before, num_bytes = logical_state(trainer), _resident_bytes(trainer)
        errors = [_error_of(partial(_go, trainer, place), LayoutRefused) for place in places]
        unchanged = same(before, logical_state(trainer)) and _resident_bytes(trainer) == num_bytes
        updates.append(_update(trainer))
        return {"errors": np.array(errors), "unchanged": np.array(unchanged), "updates": np.array(updates)}


def unreadable_files(context: RankContext, *, folder: str) -> Results:
    """Save, damage a file, and start another trainer from the files. Returns its error, and whether it has a state."""
    path = Path(folder)
    with started(context, HOME) as trainer:
        checkpoints.save(trainer, path, str(context.rank))
        trainer.world.barrier(trainer.world.membership.members)
        files = StateFiles(path, {file.name: file_checksum(file) for file in sorted(path.iterdir())})
        trainer.world.barrier(trainer.world.membership.members)
        if context.rank == 1:
            content = bytearray((path / "1").read_bytes())
            content[-1] ^= 1
            (path / "1").write_bytes(content)
        trainer.world.barrier(trainer.world.membership.members)
        other = ElasticTrainer(trainer.provider, trainer.optimizer_config, world=trainer.world)
        error = _error_of(lambda: checkpoints.start_from(other, files, HOME), (FileCorrupt, MemberFailed))
        found = {"error": np.array(error), "has_state": np.array(other.location is not None)}
        other.close()
        return found


def failing(context: RankContext, *, member: int, point: str, target: dict[str, Any], shared: bool) -> Results:
    """One member's memory or transfer fails once at a point. Also the updates around it, and the switch that works."""
    failures: list[Exception] = []
    if context.rank == member:
        failures.append(ArenaFull("no room") if point == "allocated" else TransferFailed("no bytes"))
    with started(context, HOME, shared=shared, on_point=_failing_at(point, failures)) as trainer:
        updates = [_update(trainer)]
        _go(trainer, target)
        _go(trainer, {"layout": {"tp": 2, "dp": 2}})
        before, num_bytes = logical_state(trainer), _resident_bytes(trainer)
        error = _error_of(partial(_go, trainer, target), (ReshardAborted, ArenaFull, TransferFailed))
        is_same = same(before, logical_state(trainer))
        is_freed = _resident_bytes(trainer) <= num_bytes
        updates.append(_update(trainer))
        _go(trainer, target)
        updates.append(_update(trainer))
        return {
            "error": np.array(error),
            "unchanged": np.array([is_same, is_freed, not failures]),
            "updates": np.array(updates),
        }


@dataclass(frozen=True)
class FailingBuild(GptProvider):
    """Each of the failures is raised once, after a build in another layout than HOME."""

    failures: list[Exception] = field(default_factory=list)

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        chunks = super().build(mesh, me, groups, device=device)
        if self.failures and mesh.layout != HOME:
            raise self.failures.pop()
        return chunks


def failing_build(context: RankContext, *, member: int, target: dict[str, Any]) -> Results:
    """One member fails once while it builds the target layout; the switch that works after it."""
    failures: list[Exception] = [ArenaFull("no room")] if context.rank == member else []

    def change(provider: GptProvider) -> GptProvider:
        return FailingBuild(provider.config, provider.padded_vocab, provider.dtype, failures=failures)

    with started(context, HOME, change=change) as trainer:
        updates = [_update(trainer)]
        before, files = logical_state(trainer), _files(trainer)
        error = _error_of(partial(_go, trainer, target), (ReshardAborted, ArenaFull))
        is_same = same(before, logical_state(trainer))
        is_clean = _files(trainer) == files
        _go(trainer, target)
        updates.append(_update(trainer))
        return {
            "error": np.array(error),
            "unchanged": np.array([is_same, is_clean, not failures]),
            "updates": np.array(updates),
        }


def _files(trainer: ElasticTrainer) -> list[str]:
    """The members' files in shared memory, once all members have made or removed theirs."""
    arena = trainer.state.arena
    assert isinstance(arena, SharedArena)
    trainer.world.barrier(trainer.world.membership.members)
    names = sorted(path.name for path in arena.path.parent.iterdir())
    trainer.world.barrier(trainer.world.membership.members)
    return names


def _failing_at(point: str, failures: list[Exception]) -> OnPoint:
    """Raise each of the failures once, from the third time that the point is reached."""
    reached = iter(range(10_000))

    def on_point(name: str) -> None:
        if name == point and next(reached) >= 2 and failures:
            raise failures.pop()

    return on_point


def _go(trainer: ElasticTrainer, place: dict[str, Any]) -> None:
    trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))


def _error_of(call: Callable[[], None], kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _update(trainer: ElasticTrainer) -> tuple[float, float]:
    update = trainer.train_minibatch(minibatch(trainer.progress.num_updates), LEARNING_RATE)
    return (update.sums[0], update.grad_norm) if update is not None else (np.nan, np.nan)


def _resident_bytes(trainer: ElasticTrainer) -> int:
    """The bytes of the pages that all members' arenas hold in shared memory; 0 where the arenas are private."""
    state = trainer.state
    if not isinstance(state.arena, SharedArena):
        return 0
    everyone = trainer.world.membership.members
    # Wait: the others may still hold memory that they are about to give back.
    trainer.world.barrier(everyone)
    resident = sum(path.stat().st_blocks for path in Path(state.arena.path).parent.iterdir()) * 512
    trainer.world.barrier(everyone)
    return resident
