"""Files that grow by whole lines and stay readable whenever their writer is killed.

Invariant: `append_lines` writes after a whole line, in one write. It first removes the part of a line that a kill or a
full disk left at the end. [test_lines: come_after_the_last_whole_one]
"""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 1 << 16


def append_lines(path: Path, lines: bytes) -> None:
    """Allows one writer at a time. OSError, also when the disk took only some of the bytes."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _cut(fd)
        if (written := os.write(fd, lines)) < len(lines):
            raise OSError(f"{path} took {written} of {len(lines)} bytes: its disk is full")
    finally:
        os.close(fd)


def _cut(fd: int) -> None:
    """Cuts the file after its last whole line."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - (1 if end == size else _BLOCK_BYTES))
        place = os.pread(fd, end - start, start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
