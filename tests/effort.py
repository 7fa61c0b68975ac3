"""How much a property tries: a third of its full number of cases, and all of them with `--full` (`make test-long`)."""

from __future__ import annotations

IS_FULL = False
"""Set before any test module is read."""
_SHARE = 3


def examples(full: int) -> int:
    """The number of examples in this run."""
    return full if IS_FULL else -(-full // _SHARE)


def distance(full: int) -> int:
    """From one tried step to the next in this run."""
    return full if IS_FULL else full * _SHARE
