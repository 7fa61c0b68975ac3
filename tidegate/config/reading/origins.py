"""Adds the origins of values to the faults of a config.

A fault names a key by its full dotted name. After another key of the same section it may write `key=`. The key in the
text is therefore enough to find the origin, whoever reports the fault and however long after reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidegate.config.base import KeyPath
from tidegate.config.reading.layers import Layer, dotted

_KEY = re.compile(r"(?<![\w./-])[A-Za-z_][\w-]*(?:(?:\.[\w-]+)+|(?==))")
_FIRST = re.compile(r"[A-Za-z_]\w*(?=[=:]| name | is )")
"""A key without a section, at the beginning of a fault. Elsewhere `job` is a plain word."""


def with_origin(fault: str, layer: Layer, at: KeyPath) -> str:
    """`fault` concerns the key at `at`, or something that is missing there."""
    origin = layer.origin(at)
    return fault if origin is None else f"{fault} [{origin.place}]"


def with_origins(faults: str, layer: Layer) -> str:
    """Add to each line the origins of the keys that it names."""
    return "\n".join(_with_those_named(line, layer) for line in faults.split("\n"))


def _with_those_named(fault: str, layer: Layer) -> str:
    named = {dotted(path): layer.origins[path] for path in _keys(fault) if path in layer.origins}
    places = {origin.place for origin in named.values()}
    if not places:
        return fault
    if len(places) == 1:
        return f"{fault} [{places.pop()}]"
    return f"{fault} [{', '.join(f'{name}: {origin.place}' for name, origin in named.items())}]"


def _keys(fault: str) -> Iterator[KeyPath]:
    if first := _FIRST.match(fault):
        yield (first.group(),)
    section: KeyPath = ()
    for found in _KEY.findall(fault):
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in found.split("."))
        if len(path) > 1:
            section = path[:-1]
            yield path
        elif section:
            yield (*section, *path)
