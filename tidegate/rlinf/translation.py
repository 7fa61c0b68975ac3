"""One pass over an RLinf config: what was given in its keys, what is given in ours, what is wrong and what is told.

Invariants: a key that is taken is gone from the values that are left; of two keys that say the same, the one in the
later layer holds, and two in one layer are a fault; a value that came from a key of RLinf's has that key in its origin.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from tidegate.config.base import KeyPath
from tidegate.config.reading.layers import Layer, dotted, paths_in, with_value
from tidegate.config.reading.origins import with_origin

MISSING = object()
"""Of a key that is not given; None is a value."""


def key_path(key: str) -> KeyPath:
    return tuple(key.split("."))


class Translation:
    """Holds the pass; `layer` is what it has come to."""

    def __init__(self, given: Layer) -> None:
        self._given = given
        self.layer = given
        self.faults: list[str] = []
        self.notes: defaultdict[str, list[str]] = defaultdict(list)
        """What is told, each with the keys it is of."""

    def now(self, key: str) -> Any:
        """The value that a key has come to; MISSING where there is none."""
        value: Any = self.layer.values
        for part in key_path(key):
            if not isinstance(value, dict) or part not in value:
                return MISSING
            value = value[part]
        return value

    def take(self, key: str) -> Any:
        """As `now`; the key is then done with."""
        value = self.now(key)
        if value is not MISSING:
            self.layer = _without(self.layer, key_path(key))
        return value

    def put(self, key: str, value: Any, source: str) -> None:
        """Gives a key of ours what `source`, a key of RLinf's, says."""
        path, origin = key_path(key), self._given.origin(key_path(source))
        assert origin is not None, f"{source} was given"
        # A section that is null says of each of its keys that it is not given.
        null = next((path[:n] for n in range(1, len(path)) if self.now(dotted(path[:n])) is None), path)
        before = self.layer.origins.get(null)
        if before is not None and before.layer > origin.layer:
            return
        if before is not None and before.layer == origin.layer:
            self.refuse(source, f"{source} and {key} ({before.told}) say the same: keep one")
            return
        origin = replace(origin, told=f"{origin.told} {source}")
        sections = {path[:n]: origin for n in range(1, len(path)) if path[:n] not in self.layer.origins}
        within = dict.fromkeys([path, *paths_in(value, path)], origin)
        self.layer = Layer(with_value(self.layer.values, path, value), {**self.layer.origins, **sections, **within})

    def refuse(self, source: str, fault: str) -> None:
        self.faults.append(with_origin(fault, self._given, key_path(source)))

    def tell(self, note: str, source: str) -> None:
        self.notes[note].append(source)


def _without(layer: Layer, path: KeyPath) -> Layer:
    """Sections that are left empty go too: they may be RLinf's alone."""
    values = _removed(layer.values, path)
    gone = {path[:n] for n in range(1, len(path) + 1) if _is_gone(values, path[:n])}
    kept = {at: origin for at, origin in layer.origins.items() if not any(at[: len(each)] == each for each in gone)}
    return Layer(values, kept)


def _removed(values: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
    first, rest = path[0], path[1:]
    inner = _removed(values[first], rest) if rest else {}
    others = {key: value for key, value in values.items() if key != first}
    return others if not inner else {key: inner if key == first else value for key, value in values.items()}


def _is_gone(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return True
        values = values[part]
    return False
