"""The text of a config file -> what it holds and where, refused where YAML itself would guess: a key given twice.

Invariants: no value is dropped in silence: YAML's own loader keeps the last of two equal keys, here it is a fault that
names the key and both lines. Keys that a merge (`<<`) brings may still be given again, as YAML has it. Each key and
each item of a list has its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tidegate.config.base import KeyPath


class NotAsMeant(ValueError):
    """YAML that would be read as something else than was written: a key given twice, an alias of what it is part of."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a text holds; None where it is empty."""

    value: object
    lines: Mapping[KeyPath, int]
    """Counted from 1."""


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looks at the keys as written: later steps put those of a merge among them."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (name := (key.tag, key.value)) in first:
                lines = f"lines {first[name].start_mark.line + 1} and {key.start_mark.line + 1}"
                raise NotAsMeant(f"key {key.value!r} is given twice, in {lines}: keep one")
            first[name] = key
        return node


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def read_yaml(text: str) -> Document:
    """NotAsMeant, or yaml.YAMLError when the text is not YAML."""
    loader = _UniqueKeyLoader(text)
    try:
        return _document(loader)
    except RecursionError as error:
        raise NotAsMeant("sections and lists lie too deep in each other to be read: no key of a config does") from error
    finally:
        loader.dispose()


def _document(loader: _UniqueKeyLoader) -> Document:
    node = loader.get_single_node()
    if node is None:
        return Document(None, {})
    # Before values are made of it, for these may hold themselves; after, merges have put their keys into it.
    _refuse_cycles(node, within=())
    value = loader.construct_document(node)
    return Document(value, dict(_lines(node, ())))


def _refuse_cycles(node: yaml.Node, *, within: tuple[yaml.Node, ...]) -> None:
    if any(node is outer for outer in within):
        line = node.start_mark.line + 1
        raise NotAsMeant(f"what begins in line {line} holds an alias of itself: write it out as far as it is meant")
    for child in _children(node):
        _refuse_cycles(child, within=(*within, node))


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    match node:
        case yaml.MappingNode():
            yield from (value for _, value in node.value)
        case yaml.SequenceNode():
            yield from node.value


def _lines(node: yaml.Node, at: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                yield (*at, key.value), key.start_mark.line + 1
                yield from _lines(value, (*at, key.value))
        case yaml.SequenceNode():
            for index, item in enumerate(node.value):
                yield (*at, index), item.start_mark.line + 1
                yield from _lines(item, (*at, index))
