"""A file that a command makes, and that it never writes over."""

from __future__ import annotations

import os
from pathlib import Path

from cli.usage import BadUsage


def write_new(path: Path, text: str, *, mode: int = 0o666) -> None:
    """BadUsage: it is there, or cannot be made. OSError: it could not be written, and is gone."""
    refuse_existing(path)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise BadUsage(f"{path} cannot be made ({error.strerror}): name another file") from error
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def refuse_existing(path: Path) -> None:
    """BadUsage, before a command that takes long."""
    if os.path.lexists(path):
        raise BadUsage(f"{path} is there already: name a new file")
