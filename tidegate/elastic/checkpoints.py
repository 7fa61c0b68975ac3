"""A trainer's state written to files, member by member, and a trainer started from such files in any layout.

Invariants: what is written is one update's state, for no member trains meanwhile; a trainer whose files cannot be read
is not started; progress goes on where the files' writer was.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from tidegate.checksums import WrittenFile
from tidegate.elastic.model.compat import group_steps, set_group_steps
from tidegate.elastic.plan.holders import State
from tidegate.elastic.state import files
from tidegate.elastic.state.files import StateFiles, write_rank
from tidegate.elastic.state.held import Held
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

_AS_JSON = TypeAdapter(Progress)
_COUNT = TypeAdapter(int)
_PROGRESS = "progress"
_STEPS = "group_steps"


def save(trainer: ElasticTrainer, folder: Path, file: str) -> WrittenFile | None:
    """Write this member's share of all that any layout needs to go on; None when its replicas write all that it holds.

    Raises NotInLayout."""
    tensors, held = trainer.state.skeleton.tensors(), trainer.held
    assert held is not None
    return write_rank(
        folder,
        file,
        parameters=trainer.provider.parameters(),
        state=held.as_end(trainer.optimizer_config),
        me=trainer.world.me,
        tensors=tensors,
        notes={
            _PROGRESS: _AS_JSON.dump_python(trainer.progress, mode="json"),
            _STEPS: group_steps(trainer.state.skeleton.optimizer),
        },
    )


def save_weights(trainer: ElasticTrainer, folder: Path, file: str) -> WrittenFile | None:
    """As `save`, of the weights alone, without notes: the same weights make the same file."""
    tensors, held = trainer.state.skeleton.tensors(), trainer.held
    assert held is not None
    parameters = trainer.provider.parameters()
    return write_rank(folder, file, parameters=parameters, state=State(held.mesh), me=trainer.world.me, tensors=tensors)


def weights_sum(trainer: ElasticTrainer) -> int:
    """What this member's `save_weights` adds to the sum of all weights, which no layout changes. Raises NotInLayout."""
    tensors, held = trainer.state.skeleton.tensors(), trainer.held
    assert held is not None
    return files.weights_sum(trainer.provider.parameters(), State(held.mesh), trainer.world.me, tensors)


def start_from(
    trainer: ElasticTrainer, saved: StateFiles, layout: Layout, *, ranks: Iterable[int] | None = None
) -> None:
    """As `ElasticTrainer.start`, with a saved state; every member of the epoch calls it, those that stand by too.

    Raises LayoutRefused and what `StateFiles.read` does; the trainer is not started then."""

    def fill(held: Held) -> Progress:
        if held.state is not None:
            saved.read(
                parameters=trainer.provider.parameters(),
                state=held.as_end(trainer.optimizer_config),
                me=trainer.world.me,
                targets=held.tensors(),
            )
            set_group_steps(held.state.skeleton.optimizer, _COUNT.validate_python(saved.notes.get(_STEPS) or 0))
        # Files that were written before progress was noted have none.
        return _AS_JSON.validate_python(saved.notes.get(_PROGRESS, {}))

    trainer.start(layout, ranks=ranks, fill=fill)
