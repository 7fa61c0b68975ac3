"""References `${...}` in the values of a config -> their values, in the notation of OmegaConf, which RLinf uses.

`${a.b}` is the value of another key, and `${.b}` that of a key in the same section. Each further dot is one section up.
RLinf adds the functions `${subtract:x,y}`, `multiply`, `int_div` and `not`.

Invariants:
- A text that is one reference gets the type of the referenced value. [test_references: a_reference_has_the_value]
- A reference to a missing key, to itself or to an unknown function is a fault. [test_references: an_unresolvable]
- References of references make no more than `_MAX_STEPS` values, texts of `_MAX_CHARACTERS` and numbers of 64 bits.
  [test_fuzzed_configs: cannot_be_blown_up]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from tidegate.config.base import KeyPath
from tidegate.config.reading.layers import Layer, dotted, with_value
from tidegate.config.reading.origins import with_origin
from tidegate.config.reading.yaml_text import read_yaml, yaml_problem

_OPEN, _CLOSE = "${", "}"
_MAX_STEPS = 100_000
"""The values that are looked at for all references of a config: hundreds of times those of RLinf's largest."""
_MAX_CHARACTERS = 10_000
_MAX_NUMBER = 2**64
_FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "multiply": (2, lambda x, y: x * y),
    "int_div": (2, lambda x, y: x // y),
    "subtract": (2, lambda x, y: x - y),
    "not": (1, lambda x: not x),
}
"""Each function with the number of its arguments."""


def without_references(given: Layer) -> Layer:
    """Replace all references. ValueError lists every reference without a value."""
    resolver, values, faults = _Resolver(given.values), given.values, list[str]()
    for path, text in _texts(given.values, ()):
        try:
            values = with_value(values, path, resolver.value_at(path))
        except (ValueError, RecursionError) as error:
            faults.append(with_origin(f"{dotted(path)}={text!r}: {error}", given, path))
    if faults:
        raise ValueError("\n".join(faults))
    return replace(given, values=values)


def _texts(value: Any, at: KeyPath) -> list[tuple[KeyPath, str]]:
    """The texts that contain a reference, with their paths."""
    if isinstance(value, str):
        return [(at, value)] if _OPEN in value else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items for found in _texts(inner, (*at, key))]


class _Resolver:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._pending: list[KeyPath] = []
        self._num_steps = 0

    def value_at(self, path: KeyPath) -> Any:
        """The value without references. ValueError: there is no value, or it refers to itself."""
        if path in self._pending:
            circle = " -> ".join(dotted(each) for each in [*self._pending[self._pending.index(path) :], path])
            raise ValueError(f"it refers to itself ({circle}): write the value")
        value = self._raw(path)
        self._pending.append(path)
        try:
            return self._resolved(value, path)
        finally:
            self._pending.pop()

    def _raw(self, path: KeyPath) -> Any:
        """The value as the config has it, with its references."""
        value: Any = self._values
        for part in path:
            is_place = isinstance(value, list) and isinstance(part, int) and part < len(value)
            if not is_place and not (isinstance(value, dict) and part in value):
                raise ValueError(f"no key {dotted(path)} is given: give it, or write the value")
            value = value[part]
        return value

    def _resolved(self, value: Any, at: KeyPath) -> Any:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise ValueError(f"the references of this config stand for more than {_MAX_STEPS:,} values: write fewer")
        if isinstance(value, dict):
            return {key: self._resolved(inner, (*at, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._resolved(inner, (*at, index)) for index, inner in enumerate(value)]
        return self._read(value, at) if isinstance(value, str) else value

    def _read(self, text: str, at: KeyPath) -> Any:
        start = text.find(_OPEN)
        if start < 0:
            return text
        end = _closing(text, start)
        value = self._referenced(text[start + len(_OPEN) : end].strip(), at)
        before, after = text[:start], text[end + len(_CLOSE) :]
        if not before and not after:
            return value
        made = f"{before}{value}{self._read(after, at)}"
        if len(made) > _MAX_CHARACTERS:
            raise ValueError(f"its references make a text of {len(made):,} characters: write a shorter one")
        return made

    def _referenced(self, inner: str, at: KeyPath) -> Any:
        name, colon, arguments = inner.partition(":")
        if not colon:
            return self.value_at(_path(inner, at))
        if name not in _FUNCTIONS:
            known = ", ".join(_FUNCTIONS)
            raise ValueError(f"{name!r} is no known function (known: {known}): write the value")
        count, function = _FUNCTIONS[name]
        values = [self._argument(each.strip(), at) for each in _split(arguments)]
        try:
            if len(values) != count:
                raise TypeError(f"it takes {count}")
            if name != "not" and not all(isinstance(value, int | float) for value in values):
                raise TypeError("it takes numbers")
            made = function(*values)
            if not -_MAX_NUMBER < made < _MAX_NUMBER:
                raise TypeError("the result is not finite, or has more than 64 bits")
            return made
        except (TypeError, ArithmeticError) as error:
            given = ", ".join(map(repr, values))
            raise ValueError(f"{name} of {given}: {error}") from error

    def _argument(self, text: str, at: KeyPath) -> Any:
        """ValueError: the text is not YAML."""
        if _OPEN in text:
            return self._read(text, at)
        try:
            return read_yaml(text).value
        except yaml.YAMLError as error:
            raise ValueError(f"{text!r} is not YAML ({yaml_problem(error)})") from error


def _path(name: str, at: KeyPath) -> KeyPath:
    """The path that `name` refers to, from the value at `at`."""
    parts = name.lstrip(".")
    dots = len(name) - len(parts)
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in parts.split("."))
    return (*at[: max(len(at) - dots, 0)], *path) if dots else path


def _closing(text: str, start: int) -> int:
    """The index of the end of the reference that begins at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text.startswith(_OPEN, index):
            depth += 1
        elif text[index] == _CLOSE:
            depth -= 1
            if depth == 0:
                return index
    raise ValueError("a ${ is not closed by }")


def _split(arguments: str) -> list[str]:
    """Split at the commas outside of references."""
    parts, depth = [""], 0
    for index, sign in enumerate(arguments):
        depth += arguments.startswith(_OPEN, index)
        depth -= sign == _CLOSE
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts
