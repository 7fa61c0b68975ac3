"""Writes a trainer's state to one file per member, and starts a trainer from such files in any layout.

Invariants:
- The files hold the state of one update, because no member trains meanwhile.
  [test_lr_progress: a_restore_at_any_update_in_another_layout]
- A trainer whose files cannot be read is not started. [test_refusals: unreadable_files_leave_the_trainer_unstarted]
- Progress continues where the writer of the files was. [test_lr_progress: a_restore_at_any_update_in_another_layout]
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
from tidegate.elastic.state.location import StateLocation
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

_AS_JSON = TypeAdapter(Progress)
_COUNT = TypeAdapter(int)
_PROGRESS = "progress"
_STEPS = "group_steps"


def save(trainer: ElasticTrainer, folder: Path, file: str) -> WrittenFile | None:
    """Write this member's share of everything that any layout needs to continue.

    All ranks of the layout call it. Returns None when this member's replicas write everything that it holds. Raises
    NotInLayout, and PeerLost as `ElasticTrainer.prove`.
    """
    trainer.prove()
    tensors, location = trainer.state.skeleton.tensors(), trainer.location
    assert location is not None
    return write_rank(
        folder,
        file,
        parameters=trainer.provider.parameters(),
        state=location.as_end(trainer.optimizer_config),
        me=trainer.world.me,
        tensors=tensors,
        notes={
            _PROGRESS: _AS_JSON.dump_python(trainer.progress, mode="json"),
            _STEPS: group_steps(trainer.state.skeleton.optimizer),
        },
    )


def save_weights(trainer: ElasticTrainer, folder: Path, file: str) -> WrittenFile | None:
    """Like `save`, for the weights alone and without notes: the same weights make the same file."""
    trainer.prove()
    tensors, location = trainer.state.skeleton.tensors(), trainer.location
    assert location is not None
    parameters = trainer.provider.parameters()
    return write_rank(
        folder, file, parameters=parameters, state=State(location.mesh), me=trainer.world.me, tensors=tensors
    )


def weights_sum(trainer: ElasticTrainer) -> int:
    """What this member's `save_weights` adds to the sum of all weights. That sum is the same in every layout.

    Raises NotInLayout.
    """
    trainer.prove()
    tensors, location = trainer.state.skeleton.tensors(), trainer.location
    assert location is not None
    return files.weights_sum(trainer.provider.parameters(), State(location.mesh), trainer.world.me, tensors)


def start_from(
    trainer: ElasticTrainer, saved: StateFiles, layout: Layout, *, ranks: Iterable[int] | None = None
) -> None:
    """Like `ElasticTrainer.start`, with a saved state. Every member of the epoch calls it, standby members too.

    Raises LayoutRefused and the errors of `StateFiles.read`. The trainer is not started then.
    """

    def fill(location: StateLocation) -> Progress:
        if location.state is not None:
            saved.read(
                parameters=trainer.provider.parameters(),
                state=location.as_end(trainer.optimizer_config),
                me=trainer.world.me,
                targets=location.tensors(),
            )
            set_group_steps(location.state.skeleton.optimizer, _COUNT.validate_python(saved.notes.get(_STEPS) or 0))
        # Files of versions that did not write progress have none.
        return _AS_JSON.validate_python(saved.notes.get(_PROGRESS, {}))

    trainer.start(layout, ranks=ranks, fill=fill)
