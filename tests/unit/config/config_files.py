"""Config files written for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def written(folder: Path, name: str, values: dict[str, Any] | str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path
