"""Finds the newest checkpoint in a job's folder. A resumed run reports it to the scheduler.

The report is needed because the servers may have lost their record of it. This module reads only the names of the
folders and, for the newest one, the figures that the event carries. The actor checks whether the files are whole, and
passes over a checkpoint that is not, as this module passes over a manifest that cannot be read.

Invariants:
- A folder without its manifest is no checkpoint. [test_checkpoint: save_that_did_not_end]
- A checkpoint that cannot be read hides no older one. [test_checkpoint: goes_on_from_the_newest_that_can_be_read]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.checkpoint_manifest import MANIFEST, read_manifest
from tidegate.checkpoint_names import place_of
from tidegate.config.job_config import ConfigError
from tidegate.json_text import parse_json, typed, typed_or_none, whole_number


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that incarnation `incarnation` wrote. A run that continues from it has a later incarnation."""

    name: str
    incarnation: int
    next_iteration: int
    version: int
    num_samples_trained: int
    lr: str | None = None
    """Its learning-rate ledger. None where it predates that ledger."""
    passed_over: tuple[str, ...] = ()
    """The newer checkpoints that cannot be read, with the reasons."""


def newest_checkpoint(folder: Path, *, fresh_command: str = "--force") -> FoundCheckpoint | None:
    """The newest whose manifest can be read; None where there is no checkpoint.

    ConfigError where there are some and none can be read. `fresh_command` is what a person types to start over."""
    found = [(place_of(path.parent.name), path) for path in folder.glob(f"inc*-it*/{MANIFEST}")]
    complete = [(place, path) for place, path in found if place is not None]
    faults: list[str] = []
    for (incarnation, _), path in sorted(complete, reverse=True):
        try:
            return _read(path, incarnation, faults)
        except OSError as error:
            raise ConfigError(f"checkpoint {path.parent} cannot be read now ({error}): see to its disk") from error
        except (ValueError, KeyError, TypeError) as error:
            faults.append(f"{path.parent.name} ({type(error).__name__}: {error})")
    if faults:
        raise ConfigError(
            f"no checkpoint in {folder} can be read: {', '.join(faults)}; put one back from a copy and start with "
            f"--resume, or start over, which removes them ({fresh_command})"
        )
    return None


def furthest_iteration(folder: Path) -> int:
    """The iteration that would follow the furthest checkpoint, by their names; 0: there is none, or nobody can tell."""
    try:
        places = [place_of(path.parent.name) for path in folder.glob(f"inc*-it*/{MANIFEST}")]
    except OSError:
        return 0
    return max((place[1] for place in places if place is not None), default=0)


def _read(path: Path, incarnation: int, faults: Sequence[str]) -> FoundCheckpoint:
    manifest = read_manifest(path.parent)
    ledger = typed(dict, parse_json(typed(str, manifest["ledger"], "ledger")), "ledger")
    return FoundCheckpoint(
        name=path.parent.name,
        incarnation=incarnation,
        next_iteration=whole_number(manifest["next_iteration"], "next_iteration"),
        version=whole_number(manifest["version"], "version"),
        num_samples_trained=whole_number(ledger["num_trained"], "num_trained"),
        lr=typed_or_none(str, manifest.get("lr"), "lr"),
        passed_over=tuple(faults),
    )
