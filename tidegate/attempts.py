"""The attempts of a job. Each start and each resume is one attempt, with its own number, logs, spans and record.

`begin_attempt` writes in this order:
1. the attempt's folder, numbered from 001;
2. the config in the form that a person reads;
3. the record;
4. the link `latest` in the job's folder, which only people need.

Invariants:
- A folder gives each number once. [test_attempts: an_attempt_cut_off]
- A run may be killed at any moment: the files that it has begun stay readable.
  [test_attempts: cut_off_in_mid_write_leaves_the_record_readable]
- A record without `ended` belongs to an attempt that runs or was killed. [test_attempts: record_says_when_an_attempt]
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

from tidegate.json_text import parse_json, typed
from tidegate.logs import without_credentials

LATEST = "latest"
_ATTEMPTS = "attempts"
_DIGITS = 3
"""The least number of digits, so that names sort in the order of the attempts up to attempt 999."""


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The files that the processes of one start of a job write."""

    root: Path

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def record(self) -> Path:
        """JSON: how the attempt was started and how it ended."""
        return self.root / "attempt.json"

    @property
    def config(self) -> Path:
        """All keys of the attempt's config, without the credentials in URLs."""
        return self.root / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def timeline(self) -> Path:
        """The spans of each slot. Each instance writes one file."""
        return self.root / "timeline"

    @property
    def trace(self) -> Path:
        """The merged spans, written at the end of the attempt."""
        return self.root / "timeline.json"


def attempts_in(job_root: Path) -> list[AttemptFolder]:
    """The attempts in their order. The list is empty before the first start of the job."""
    folders = [path for path in (job_root / _ATTEMPTS).glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(map(AttemptFolder, folders), key=lambda attempt: attempt.number)


def newest_attempt(job_root: Path) -> AttemptFolder:
    """The attempt that runs or ran last. Before the first start: the folder that the first attempt will use."""
    begun = attempts_in(job_root)
    return begun[-1] if begun else _numbered(job_root, 1)


def begin_attempt(
    job_root: Path, *, config: Mapping[str, Any], record: Mapping[str, Any], now_unix_s: float
) -> AttemptFolder:
    """Starts the next attempt. The caller must hold the job's lock."""
    begun = attempts_in(job_root)
    attempt = _numbered(job_root, begun[-1].number + 1 if begun else 1)
    for folder in (attempt.logs, attempt.timeline):
        folder.mkdir(parents=True)
    text = yaml.safe_dump(without_credentials(config), sort_keys=False, allow_unicode=True)
    attempt.config.write_text(text)
    _write(attempt.record, {"attempt": attempt.number, "began": _as_text(now_unix_s), **record})
    _link(job_root, attempt)
    return attempt


def end_attempt(attempt: AttemptFolder, outcome: Mapping[str, Any], *, now_unix_s: float) -> None:
    """Adds the outcome to the attempt's record."""
    record = read_record(attempt)
    _write(attempt.record, {**record, "ended": _as_text(now_unix_s), **outcome})


def read_record(attempt: AttemptFolder) -> dict[str, Any]:
    """The attempt's record. Its number alone where there is none, or the file is damaged."""
    try:
        return typed(dict, parse_json(attempt.record.read_bytes()), str(attempt.record))
    except (FileNotFoundError, ValueError):
        return {"attempt": attempt.number}


def _numbered(job_root: Path, number: int) -> AttemptFolder:
    return AttemptFolder(job_root / _ATTEMPTS / f"{number:0{_DIGITS}}")


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the file atomically: a reader sees the whole record or the former one."""
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
