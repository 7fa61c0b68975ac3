"""Finds the newest checkpoint in a job's folder. A resumed run reports it to the scheduler.

The report is needed because the servers may have lost their record of it. This module reads only the names of the
folders and, for the newest one, the figures that the event carries. The actor checks whether the files are whole.

Invariant: a folder without its manifest is no checkpoint. [test_checkpoint: save_that_did_not_end]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tidegate.checkpoint_names import place_of
from tidegate.config.job_config import ConfigError

_MANIFEST = "manifest.json"


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


def newest_checkpoint(folder: Path, *, fresh_command: str = "--force") -> FoundCheckpoint | None:
    """None where there is none. ConfigError, with `fresh_command` as remedy, when the newest manifest is unreadable."""
    found = [(place_of(path.parent.name), path) for path in folder.glob(f"inc*-it*/{_MANIFEST}")]
    complete = [(place, path) for place, path in found if place is not None]
    if not complete:
        return None
    (incarnation, _), path = max(complete)
    try:
        manifest = json.loads(path.read_text())
        return FoundCheckpoint(
            name=path.parent.name,
            incarnation=incarnation,
            next_iteration=int(manifest["next_iteration"]),
            version=int(manifest["version"]),
            num_samples_trained=int(json.loads(manifest["ledger"])["num_trained"]),
            lr=manifest.get("lr"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"checkpoint {path.parent} cannot be read ({type(error).__name__}: {error}): put it back from a copy, or "
            f"start over ({fresh_command})"
        ) from error
