"""The faults of a config, each with where the values that it is about were given.

Invariant: a fault names a key by its full dotted name, or, behind another of the same section, as `key=`; so the key
itself says where to look, in whatever text a fault is told, long after the config was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidegate.config.base import KeyPath
from tidegate.config.reading.layers import Layer, dotted

_KEY = re.compile(r"(?<![\w./-])[A-Za-z_][\w-]*(?:(?:\.[\w-]+)+|(?==))")
_FIRST = re.compile(r"[A-Za-z_]\w*(?=[=:]| name | is )")
"""A key that stands alone, at the beginning of a fault: elsewhere `job` is a word."""


def with_origin(fault: str, layer: Layer, at: KeyPath) -> str:
    """`fault` is of the key at `at`, or of something that is missing there."""
    origin = layer.origin(at)
    return fault if origin is None else f"{fault} [{origin.told}]"


def with_origins(faults: str, layer: Layer) -> str:
    """Each line with the origins of the keys that it names."""
    return "\n".join(_with_those_named(line, layer) for line in faults.split("\n"))


def _with_those_named(fault: str, layer: Layer) -> str:
    named = {dotted(path): layer.origins[path] for path in _keys(fault) if path in layer.origins}
    told = {origin.told for origin in named.values()}
    if not told:
        return fault
    if len(told) == 1:
        return f"{fault} [{told.pop()}]"
    return f"{fault} [{', '.join(f'{name}: {origin.told}' for name, origin in named.items())}]"


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
