"""The attempts of a job: each start and each resume is one, numbered from 001, with its own logs, spans and record.

Order of a beginning: the folder, the config as a person reads it, the record, then the link `latest` in the job's
folder, which only people need. Invariants: a number is given once in a folder; whatever moment a run dies at, what it
had begun is readable; a record without `end` is of an attempt that runs, or was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tidegate.logs import without_credentials

LATEST = "latest"
_ATTEMPTS = "attempts"
_DIGITS = 3
"""Of a number, at least: names sort as the attempts came, up to the thousandth."""


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """What the processes of one start of a job write while it lasts."""

    root: Path

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def record(self) -> Path:
        """How it was started and how it ended, as JSON."""
        return self.root / "attempt.json"

    @property
    def config(self) -> Path:
        """All keys that it runs with, the credentials of URLs left out."""
        return self.root / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def timeline(self) -> Path:
        """Spans of each slot, a file an instance."""
        return self.root / "timeline"

    @property
    def trace(self) -> Path:
        """The spans merged, written at the end."""
        return self.root / "timeline.json"


def attempts_in(job_root: Path) -> list[AttemptFolder]:
    """In their order; none before the job was first started."""
    folders = [path for path in (job_root / _ATTEMPTS).glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(map(AttemptFolder, folders), key=lambda attempt: attempt.number)


def newest_attempt(job_root: Path) -> AttemptFolder:
    """The one that runs, or ran last; before any began, where the first will be."""
    begun = attempts_in(job_root)
    return begun[-1] if begun else _numbered(job_root, 1)


def begin_attempt(
    job_root: Path, *, config: Mapping[str, Any], record: Mapping[str, Any], now_unix_s: float
) -> AttemptFolder:
    """The next one. Only who holds the job's lock may ask."""
    begun = attempts_in(job_root)
    attempt = _numbered(job_root, begun[-1].number + 1 if begun else 1)
    for made in (attempt.logs, attempt.timeline):
        made.mkdir(parents=True)
    text = yaml.safe_dump(without_credentials(config), sort_keys=False, allow_unicode=True)
    attempt.config.write_text(text)
    _write(attempt.record, {"attempt": attempt.number, "began": _as_text(now_unix_s), **record})
    _link(job_root, attempt)
    return attempt


def end_attempt(attempt: AttemptFolder, outcome: Mapping[str, Any], *, now_unix_s: float) -> None:
    """Adds to its record how it ended."""
    record = json.loads(attempt.record.read_text())
    _write(attempt.record, {**record, "ended": _as_text(now_unix_s), **outcome})


def _numbered(job_root: Path, number: int) -> AttemptFolder:
    return AttemptFolder(job_root / _ATTEMPTS / f"{number:0{_DIGITS}}")


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """The file appears whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)


def _link(job_root: Path, attempt: AttemptFolder) -> None:
    partial = job_root / f"{LATEST}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(attempt.root.relative_to(job_root))
    os.replace(partial, job_root / LATEST)


def _as_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="milliseconds")
