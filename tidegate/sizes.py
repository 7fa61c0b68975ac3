"""Sizes of memory, for people. Pure."""

from __future__ import annotations

_MIB, _GIB = 2**20, 2**30
_LITTLE = 64 * _MIB


def size_text(num_bytes: float) -> str:
    """12.4 GiB, or 64 MiB."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


def host_memory_text(num_bytes: int, *, before: str) -> str:
    """`before` and the host memory that a job needs on each of its nodes; empty where it is little."""
    return f"{before}{size_text(num_bytes)} of host memory" if num_bytes >= _LITTLE else ""
