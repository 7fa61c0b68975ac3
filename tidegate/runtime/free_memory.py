"""Gives memory that this process has freed back to the machine and to its GPU."""

from __future__ import annotations

import ctypes
import gc

import torch


def return_free_memory() -> None:
    """glibc keeps freed blocks of up to 32 MiB for itself: a standby would hold the memory of its weights.

    Does nothing where the C library has no such call.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def held_device_bytes() -> int:
    """The bytes of its GPU that torch has in this process, after it gave back what nothing uses. 0 on a CPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
