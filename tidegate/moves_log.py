"""The log of a job's decisions and moves: what the scheduler chose and why, and what came of it. JSON lines in the
job's folder, read by `tidegate why`, `timeline`, `top` and `describe`.

Each line has `kind` and `at_ms`, the store's clock. The kinds are those of `services.scheduler.decide.chronicle`.

Nothing is decided from the log. A lost line costs an explanation.

Invariants:
- The log has at most two files of `max_bytes`, besides the last line. [test_moves_log: older_file_goes]
- Lines of several replicas stay whole. [test_moves_log: lines_of_two_writers_stay_whole]
- A reader skips what a kill cut off. [test_moves_log: line_cut_off_is_skipped]
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tidegate.json_text import parse_json
from tidegate.lines import append_lines

MAX_BYTES = 16 * 2**20
"""One file. A line has some 500 B to 2 kB: two files hold the last 15,000 decisions or more."""

Line = Mapping[str, Any]


class MovesLog:
    """Appends to the log at `path`. The file before it is `path` with `.1` before its suffix."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def append(self, lines: Sequence[Line]) -> None:
        """OSError."""
        if not lines:
            return
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with _alone(self._path):
            with suppress(FileNotFoundError):
                if self._path.stat().st_size >= self._max_bytes:
                    os.replace(self._path, _older(self._path))
            append_lines(self._path, text.encode())


def read_moves(path: Path) -> list[Line]:
    """All lines of the log, in order. Empty where the job has none."""
    return [line for file in (_older(path), path) for line in _lines(file)]


def _lines(path: Path) -> Iterator[Line]:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        with suppress(ValueError):
            found = parse_json(line)
            if isinstance(found, dict) and "kind" in found and "at_ms" in found:
                yield found


def _older(path: Path) -> Path:
    return path.with_name(f"{path.stem}.1{path.suffix}")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Replicas of one machine take turns: each cuts a broken line before it writes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
