"""The newest checkpoint in a job's folder, which a resumed run tells the scheduler: its servers may have lost theirs.

Read are the folders' names and, of the newest, the figures that the event carries. Whether its files are whole is the
actor's to check. Invariant: a folder without its manifest is no checkpoint.
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
    """`incarnation` wrote it; whoever goes on from it has a later one."""

    name: str
    incarnation: int
    next_iteration: int
    version: int
    num_samples_trained: int


def newest_checkpoint(folder: Path, *, anew: str = "--force") -> FoundCheckpoint | None:
    """None where there is none. ConfigError, with `anew` as a remedy, when the newest one's manifest cannot be read."""
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
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"checkpoint {path.parent} cannot be read ({type(error).__name__}: {error}): put it back from a copy, or "
            f"start anew ({anew})"
        ) from error
