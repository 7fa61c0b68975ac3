"""What a part tells the runner: a JSON file that the part writes anew whenever it knows more.

So a part that is stopped by its limit leaves the figures that it had.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SKIPPED_STATUS = 77
"""The exit status of a part that cannot run here. It is that of automake's tests, which no Python error has."""


class Skipped(Exception):
    """The part cannot run on this machine. The message says why."""


@dataclass(slots=True)
class PartReport:
    """`figures` have units in their keys."""

    path: Path
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def note(self, figures: Mapping[str, Any]) -> None:
        self.figures |= figures
        self._write()

    def skip(self, reason: str) -> None:
        self.reason = reason
        self._write()

    def keep(self, name: str, file: Path) -> None:
        """Leave a copy of the file for the runner, under a name without a folder."""
        self.kept.mkdir(exist_ok=True)
        shutil.copyfile(file, self.kept / name)

    @property
    def kept(self) -> Path:
        """The folder of the files that the part leaves beside its figures."""
        return self.path.parent / "kept"

    @classmethod
    def read(cls, path: Path) -> PartReport:
        """What the part wrote. Empty where it wrote nothing."""
        if not path.exists():
            return cls(path)
        found = json.loads(path.read_text())
        return cls(path, found["figures"], found["reason"])

    def _write(self) -> None:
        write_json(self.path, {"figures": self.figures, "reason": self.reason})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes the file atomically: a reader sees the whole value or the former one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)
