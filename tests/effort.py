"""How many examples a property gets: a third of its full number, and all of them with `--full` (`make test-long`)."""

from __future__ import annotations

IS_FULL = False
"""Set before any test module is read."""
_SHARE = 3


def examples(full: int) -> int:
    """The number of examples in this run."""
    return full if IS_FULL else -(-full // _SHARE)
