"""Parts of a long benchmark, kept so that a run that was stopped goes on where it was.

They lie in `build/benchmarks`, by benchmark and commit. Where the working tree differs from its commit no part is kept
or taken, as it could be of other code; saved results may differ. A part is what JSON can hold, and comes back the same
to the last bit. Remove the folder to run all parts again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import commit

KEPT = Path("build/benchmarks")
_CHANGED = ("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")


def kept_in(benchmark: str) -> Path | None:
    """The folder of a benchmark's parts at this commit. None: the working tree is not a commit's."""
    changed = subprocess.run(_CHANGED, capture_output=True, text=True, check=False)
    return KEPT / benchmark / commit() if changed.returncode == 0 and not changed.stdout.strip() else None


def part(folder: Path | None, name: str, make: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What `make` gives, or gave in an earlier run. `name`: of the part, in letters and digits."""
    file = None if folder is None else folder / (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") + ".json")
    if file is not None and file.exists():
        return json.loads(file.read_text())
    text = json.dumps(make(*args, **more))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A run that is stopped while it writes leaves no half of a part.
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(text)
        own.replace(file)
    return json.loads(text)
