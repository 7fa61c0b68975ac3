"""The events of a job, read from its folder while it runs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class EventRows:
    """The rows of `events.jsonl` as they come, each once. A file that became shorter is read again."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._offset = 0
        self._seen: set[str] = set()

    def read(self) -> bool:
        """Whether there are new rows."""
        before = len(self.rows)
        with suppress(FileNotFoundError), self._path.open("rb") as stream:
            if stream.seek(0, 2) < self._offset:
                self._offset = 0
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(line)
        return len(self.rows) > before

    def _take(self, line: bytes) -> None:
        # A line that a fault has damaged is of no use to anybody.
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            event = row["event"]
            if event["id"] not in self._seen:
                self._seen.add(event["id"])
                self.rows.append(event | {"stream_sequence": int(row["stream_sequence"])})

    def lead(self, role: str) -> str | None:
        """The node of the instance that leads, as far as the file tells."""
        found = [row for row in self.rows if "lead_elected" in row and str(row["source"]).startswith(f"{role}@")]
        return str(found[-1]["source"]).partition("@")[2] if found else None
