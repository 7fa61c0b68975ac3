"""One pass over an RLinf config: the remaining values, the translated values, the faults and the notes.

Invariants:
- A key that `take` returned is no longer in the values. [test_rlinf: a_key_that_is_taken]
- If two keys set the same value, the one in the later layer holds. [test_rlinf: a_later_layer_takes_precedence]
- Two such keys in one layer are a fault. [test_rlinf: two_names_for_one_setting]
- A translated value has RLinf's key in its origin. [test_rlinf: a_fault_of_a_translated_value]
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from tidegate.config.base import KeyPath
from tidegate.config.reading.layers import Layer, dotted, paths_in, with_value
from tidegate.config.reading.origins import with_origin

MISSING = object()
"""Stands for the value of a missing key. None is a value."""


def key_path(key: str) -> KeyPath:
    return tuple(key.split("."))


class Translation:
    """The state of the pass. `layer` has the remaining and the translated values."""

    def __init__(self, given: Layer) -> None:
        self._given = given
        self.layer = given
        self.faults: list[str] = []
        self.notes: defaultdict[str, list[str]] = defaultdict(list)
        """Each note with the keys that it concerns."""

    def now(self, key: str) -> Any:
        """The present value of a key. MISSING: there is none."""
        value: Any = self.layer.values
        for part in key_path(key):
            if not isinstance(value, dict) or part not in value:
                return MISSING
            value = value[part]
        return value

    def take(self, key: str) -> Any:
        """As `now`, and remove the key."""
        value = self.now(key)
        if value is not MISSING:
            self.layer = _without(self.layer, key_path(key))
        return value

    def put(self, key: str, value: Any, source: str) -> None:
        """Set one of Tidegate's keys to the value from `source`, a key of RLinf's."""
        path, origin = key_path(key), self._given.origin(key_path(source))
        assert origin is not None, f"{source} has an origin"
        parents = [path[:n] for n in range(1, len(path))]
        for section in map(dotted, parents):
            held = self.now(section)
            if held is not MISSING and held is not None and not isinstance(held, dict):
                self.refuse(source, f"{source} sets {key}, but {section}={held!r} holds no keys: remove one")
                return
        # A section that is null sets all its keys to their defaults, so it competes with `source` too.
        null = next((at for at in parents if self.now(dotted(at)) is None), path)
        before = self.layer.origins.get(null)
        if before is not None and before.layer > origin.layer:
            return
        if before is not None and before.layer == origin.layer:
            self.refuse(source, f"{source} and {key} ({before.place}) set the same value: keep one")
            return
        origin = replace(origin, place=f"{origin.place} {source}")
        sections = {at: origin for at in parents if at not in self.layer.origins}
        within = dict.fromkeys([path, *paths_in(value, path)], origin)
        self.layer = Layer(with_value(self.layer.values, path, value), {**self.layer.origins, **sections, **within})

    def refuse(self, source: str, fault: str) -> None:
        self.faults.append(with_origin(fault, self._given, key_path(source)))

    def add_note(self, note: str, source: str) -> None:
        self.notes[note].append(source)


def _without(layer: Layer, path: KeyPath) -> Layer:
    """Remove a key, and the sections that are empty without it: they may be RLinf's alone."""
    values = _removed(layer.values, path)
    missing = {path[:n] for n in range(1, len(path) + 1) if _is_missing(values, path[:n])}
    kept = {at: origin for at, origin in layer.origins.items() if not any(at[: len(each)] == each for each in missing)}
    return Layer(values, kept)


def _removed(values: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
    first, rest = path[0], path[1:]
    inner = _removed(values[first], rest) if rest else {}
    others = {key: value for key, value in values.items() if key != first}
    return others if not inner else {key: inner if key == first else value for key, value in values.items()}


def _is_missing(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return True
        values = values[part]
    return False
