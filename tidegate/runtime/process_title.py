"""Gives this process another command line, which `ps` and `nvidia-smi` show: what a worker works on.

The kernel shows the memory that held the arguments at the start. The package setproctitle does the same, for other
systems too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_ARG_START = 45
"""The place of arg_start in /proc/self/stat behind the name, which may itself hold blanks: field 48 of proc(5)."""


def set_process_title(title: str) -> None:
    """Cuts the title to the length of the present command line. Does nothing where the kernel hides its place. Words of
    a command line are parted by null bytes."""
    behind_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(behind_name[_ARG_START]), int(behind_name[_ARG_START + 1])
    if not 0 < start < end:
        return
    # The last byte stays 0: without it the kernel would show the environment too.
    text = title.encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
