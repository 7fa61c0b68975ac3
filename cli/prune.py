"""Removes the stores of jobs that have ended: `servers/`, the data of a job's embedded NATS and Redis. The gates of its
nodes go with it: a new store begins with small tokens, which the gates of the old one refuse.

What a person reads of an ended job is in files beside its store: events, samples, checkpoints, results. Only a resume
reads the store. Without it the job goes on from its newest checkpoint. [test_resumes: whose_store_was_pruned] A
finished job is resumed only to train longer, so its store goes at once. Those of other jobs go on request.

Invariants:
- The store of a job that runs stays, whatever is asked. A run cannot begin in the middle of a removal.
  [test_prune: a_job_that_runs]
- A GPU that a living process holds keeps its gate, and the job its store. [test_prune: still_held]
- Without `--yes` nothing is removed. [test_prune: nothing_is_removed]
- A store is there as a whole or not at all, also after a kill. [test_prune: a_removal_that_was_killed]
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidegate.gate import Gate, GateDamaged
from tidegate.job import JobFolder
from tidegate.launcher.lock import LOCK, job_lock
from tidegate.launcher.outcome import End, Outcome

COLUMNS = ("job", "state", "store_bytes", "pruned", "note")
_LEFT_OVER = "servers.removed"


@dataclass(frozen=True, slots=True)
class Pruned:
    """One job. `store_bytes` is the room that its store takes, or took: None where it was not measured.

    `is_chosen`: its store may go.
    """

    job: str
    state: str
    store_bytes: int | None
    is_chosen: bool
    note: str

    def row(self, *, is_removed: bool) -> dict[str, object]:
        pruned = self.is_chosen and is_removed
        values = (self.job, self.state, self.store_bytes, pruned, self.note)
        return dict(zip(COLUMNS, values, strict=True))


def prune(folder: JobFolder, *, with_resumable: bool, remove: bool) -> Pruned | None:
    """None for a job without a store."""
    stores = [path for path in (folder.servers, folder.root / _LEFT_OVER) if path.is_dir() and not path.is_symlink()]
    if not stores:
        return None
    job, size = folder.root.name, None
    try:
        with job_lock(folder.root / LOCK) as is_free:
            size = sum(map(size_bytes, stores))
            if not is_free:
                return Pruned(job, "live", size, False, "it runs")
            end = Outcome.read(folder.result).end if folder.result.exists() else None
            state = "killed" if end is None else str(end)
            if end is not End.FINISHED and not with_resumable:
                return Pruned(job, state, size, False, "it can be resumed; --resumable prunes it too")
            if held := [state.gpu for gate in _gates(folder) for state in Gate(gate).report() if state.held]:
                note = f"a process that outlived its run holds {', '.join(held)}: end it, then prune again"
                return Pruned(job, state, size, False, note)
            if remove:
                _remove(folder)
    except (OSError, ValueError, GateDamaged) as error:
        # Report it in the job's row: the stores of the other jobs can go.
        return Pruned(job, "unknown", size, False, str(error))
    return Pruned(job, state, size, True, "" if end is End.FINISHED else "it resumes from its newest checkpoint")


def _gates(folder: JobFolder) -> list[Path]:
    return sorted(folder.root.glob("nodes/*/gate"))


def _remove(folder: JobFolder) -> None:
    # First: a kill may leave a store without gates, which accept its tokens, and never gates without their store.
    for gate in _gates(folder):
        shutil.rmtree(gate)
    left_over = folder.root / _LEFT_OVER
    if left_over.exists():
        shutil.rmtree(left_over)
    if folder.servers.exists():
        # Rename first: a kill in the middle of the removal would leave half a store for a resume to find.
        folder.servers.rename(left_over)
        shutil.rmtree(left_over)


def size_bytes(folder: Path) -> int:
    """What the files take on the disk: the streams of NATS are larger than what is in them."""
    size = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            # Skip a file that is gone by now: the servers of a live job remove theirs.
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(root, name)).st_blocks * 512
    return size
