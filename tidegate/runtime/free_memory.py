"""Gives memory that this process has freed back to the machine."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """glibc keeps freed blocks of up to 32 MiB for itself: a standby would hold the memory of its weights.

    Does nothing where the C library has no such call.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
