"""Several layers of a config -> one layer, in which each key has its last value and the origin of that value.

Layers are files from left to right, then `key=value` words from left to right. Sections are merged key by key. Any
other value replaces the one below it: lists too, and mappings of names such as `cluster.nodes`.

Invariants:
- Merging changes no layer. [test_layers: merging_changes_no_layer]
- A relative path counts from the folder of the layer that sets it, whatever layers follow.
  [test_layers: a_relative_path_counts_from_the_folder]
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tidegate.config.base import ITEM, FileName, KeyPath
from tidegate.config.reading.yaml_text import AmbiguousYaml, read_yaml, yaml_problem

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w,-]+)*")
"""Keys of RLinf's placements contain commas: `actor,rollout`."""
_BEFORE_EQUALS = re.compile(r"[^/=]*=")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value is written."""

    place: str
    """`job.yaml:7`, or the override."""
    folder: Path
    layer: int
    """The number of the layer, counted from the lowest."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Values, with the origin of each key, section and list item that a source writes."""

    values: dict[str, Any]
    origins: Mapping[KeyPath, Origin]

    def origin(self, path: KeyPath) -> Origin | None:
        """The origin of the key itself, else that of the nearest section around it."""
        for length in range(len(path), 0, -1):
            if found := self.origins.get(path[:length]):
                return found
        return None


EMPTY_LAYER = Layer({}, {})


@dataclass(frozen=True, slots=True)
class Override:
    """`key=value`: a dotted key, and the text after the first `=` as YAML reads it."""

    text: str
    path: tuple[str, ...]
    value: Any


def is_override(argument: str) -> bool:
    """Whether a word stands for `key=value`, well-formed or not. A word with a slash before the `=` is a file."""
    return _BEFORE_EQUALS.match(argument) is not None


def parse_override(text: str) -> Override:
    """ValueError: the key or the value is malformed."""
    key, _, value = text.partition("=")
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"override {text!r}: {key!r} is no key; write section.key=value, such as algorithm.group_size=8"
        )
    if not value.strip():
        raise ValueError(f"override {text!r} has no value: write {key}=null for none, {key}=\"''\" for an empty text")
    try:
        read = read_yaml(value).value
    except AmbiguousYaml as error:
        raise ValueError(f"override {text!r}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(
            f"override {text!r}: the value is not YAML ({yaml_problem(error)}); "
            "quote a text that contains signs of YAML"
        ) from error
    return Override(text, tuple(key.split(".")), read)


def merge_layers(below: Layer, above: Layer, *, whole: Collection[tuple[str, ...]]) -> Layer:
    """`above` over `below`. `whole` has the keys whose mappings are values, not sections."""
    values, replaced = _merged(below.values, above.values, (), whole)
    kept = {path: origin for path, origin in below.origins.items() if not _lies_in(path, replaced)}
    return Layer(values, {**kept, **above.origins})


def apply_override(below: Layer, override: Override, origin: Origin, *, whole: Collection[tuple[str, ...]]) -> Layer:
    """ValueError: the key leads into a plain value, or to an item that a list does not have."""
    at = _place(override, below.values)
    old, value, replaced = _at(below.values, at), override.value, {at}
    if isinstance(old, dict) and isinstance(value, dict) and at not in whole:
        value, replaced = _merged(old, value, at, whole)
    kept = {path: written for path, written in below.origins.items() if not _lies_in(path, replaced)}
    made = {at[:length]: origin for length in range(1, len(at)) if at[:length] not in kept}
    given = dict.fromkeys([at, *paths_in(override.value, at)], origin)
    return Layer(with_value(below.values, at, value), {**kept, **made, **given})


def with_absolute_paths(layer: Layer, names: Mapping[tuple[str, ...], FileName]) -> Layer:
    """Make each text absolute that `names` marks as a path."""
    values: Any = layer.values
    for path, origin in layer.origins.items():
        name = names.get(tuple(ITEM if isinstance(part, int) else part for part in path))
        text = _at(values, path)
        if name is not None and isinstance(text, str) and text and text not in name.other_than:
            values = with_value(values, path, absolute(text, origin.folder))
    return replace(layer, values=values)


def with_value(below: Any, path: KeyPath, value: Any) -> Any:
    """A copy of `below` with another value at `path`."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        return [with_value(item, rest, value) if index == first else item for index, item in enumerate(below)]
    held = below or {}
    return {**held, first: with_value(held.get(first), rest, value)}


def paths_in(value: Any, at: KeyPath) -> list[KeyPath]:
    """The paths of every key and item within the value at `at`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ((*at, key), *paths_in(inner, (*at, key)))]


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def absolute(path: str, folder: Path) -> str:
    """Links are not followed: the place of its link decides which environment a virtual interpreter belongs to."""
    return os.path.normpath(folder.absolute() / path)


def _merged(
    below: dict[str, Any], above: dict[str, Any], at: KeyPath, whole: Collection[tuple[str, ...]]
) -> tuple[dict[str, Any], set[KeyPath]]:
    """The merged values, and the paths at which `above` replaces a value of `below`."""
    values, replaced = dict(below), set[KeyPath]()
    for key, value in above.items():
        path, old = (*at, key), below.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and path not in whole:
            values[key], within = _merged(old, value, path, whole)
            replaced |= within
        else:
            values[key] = value
            replaced.add(path)
    return values, replaced


def _lies_in(path: KeyPath, roots: set[KeyPath]) -> bool:
    return any(path[:length] in roots for length in range(1, len(path) + 1))


def _place(override: Override, values: dict[str, Any]) -> KeyPath:
    """The override's path, with a number for each place in a list."""
    at: KeyPath = ()
    held: Any = values
    for index, part in enumerate(override.path):
        if isinstance(held, list):
            if not part.isdecimal() or int(part) >= len(held):
                raise ValueError(f"override {override.text!r}: {_items(at, held)}")
            at, held = (*at, int(part)), held[int(part)]
        elif held is None or isinstance(held, dict):
            at, held = (*at, part), (held or {}).get(part)
        else:
            inner, outer = ".".join(override.path[index:]), dotted(at)
            raise ValueError(f"override {override.text!r}: {outer} is {held!r}, which holds no key {inner!r}")
    return at


def _items(at: KeyPath, held: list[Any]) -> str:
    count = f"has the items 0 to {len(held) - 1}" if held else "is empty"
    return f"{dotted(at)} {count}; to set the whole list write {dotted(at)}=[...]"


def _at(values: Any, path: KeyPath) -> Any:
    """The value at the path of an origin. None: a key of another type hides it after a merge."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values
