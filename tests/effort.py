"""How much `make test` tries: an eighth of a property's examples, some cases of a test. `make test-long` tries all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

IS_FULL = False
"""Set before any test module is read."""
_SHARE = 8


def examples(full: int) -> int:
    """The number of examples in this run."""
    return full if IS_FULL else -(-full // _SHARE)


def distance(full: int) -> int:
    """From one tried step to the next in this run."""
    return full if IS_FULL else full * _SHARE


def cases(values: Iterable[Any], *, always: Collection[Any]) -> list[Any]:
    """The values of a parameter, or tuples of them. Those that are not `always` tried are marked as long."""
    return [value if value in always else _long(value) for value in values]


def _long(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)
