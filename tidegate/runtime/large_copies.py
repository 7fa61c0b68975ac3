"""The environment in which a process copies tensors at the memory's rate.

glibc writes past the caches only where one copy is larger than most of the last cache. Below that each line of the
target is read before it is written. A reshard copies regions of a few MiB, which then take up to 1.7 times as long.
glibc reads its tunables when a process starts, so its parent has to set them.
"""

from __future__ import annotations

from collections.abc import Mapping

_TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
_LARGE_BYTES = 1 << 20
"""Larger than what a processor's second cache would keep for the next reader."""


def with_large_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment's tunables, with the one for large copies unless they have it."""
    tunables = environment.get(_TUNABLES, "")
    if _THRESHOLD in tunables:
        return {_TUNABLES: tunables}
    return {_TUNABLES: ":".join(filter(None, (tunables, f"{_THRESHOLD}={_LARGE_BYTES:#x}")))}
