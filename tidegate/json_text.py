"""Reads JSON that another process, an earlier start or a person wrote. It may be cut off, changed or hostile.

Invariants:
- Any text and any bytes give a value or a ValueError. `json.loads` alone raises a RecursionError where values are
  nested too deeply. [test_fuzzed_records: reads_as_a_value_or_is_refused]
- A typed value is of exactly that type: neither a bool nor 1.5 is a whole number.
  [test_fuzzed_records: number_is_whole]
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

T = TypeVar("T")

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_SHOWN = 60
"""The characters of a wrong value that a message shows."""


def parse_json(text: str | bytes) -> Any:
    """ValueError: the text is no UTF-8 or no JSON, or has values nested or numbers long beyond what Python reads."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
        if _ESCAPED_SURROGATE.search(text):
            # Half a character can be written nowhere again, and ends protobuf's reader with a SystemError.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("its values are nested too deeply to be read") from error
    return value


def typed(kind: type[T], value: Any, what: str) -> T:
    """The value. ValueError where its type is another. `what` names it for the message."""
    if type(value) is not kind:
        raise ValueError(f"{what} is {repr(value)[:_MAX_SHOWN]}; it must be of type {kind.__name__}")
    return value


def typed_or_none(kind: type[T], value: Any, what: str) -> T | None:
    """As `typed`, where null stands for none."""
    return None if value is None else typed(kind, value, what)


def whole_number(value: Any, what: str, *, most: int | None = None) -> int:
    """A whole number of at least 0, and at most `most`. ValueError for any other value."""
    if typed(int, value, what) < 0:
        raise ValueError(f"{what} is {value}; it must be at least 0")
    if most is not None and value > most:
        raise ValueError(f"{what} is {str(value)[:_MAX_SHOWN]}; it must be at most {most}")
    return int(value)
