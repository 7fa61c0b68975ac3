"""What the journal of a job's updates tells the next start.

Invariant: a line that a kill cut off hides no older one. [test_journal: the_last_whole_line]
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tidegate.json_text import parse_json, typed


def newest_incarnation(journal: Path) -> int:
    """The incarnation of the last update that was written down. 0 where there is none."""
    lines: list[bytes] = []
    with suppress(FileNotFoundError):
        lines = journal.read_bytes().splitlines()
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):
            return int(typed(str, parse_json(line)["update"], "update").partition(".")[0])
    return 0
