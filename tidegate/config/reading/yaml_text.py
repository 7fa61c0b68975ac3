"""The text of a config file -> its values and their lines.

Invariants:
- No value is dropped in silence. YAML's own loader keeps the last of two equal keys; here two equal keys are a fault
  that names the key and both lines. [test_config_files: a_file_that_holds_no_config]
- A key that a merge (`<<`) brings may be written again, as YAML allows. [test_config_files: a_key_that_a_merge_brings]
- Each key and each item of a list has its line. [test_layers: a_fault_names_the_file_and_line]
- A text takes no more time and memory than its size allows, whatever its aliases repeat. Any text gives a document or
  one of the documented errors. [test_fuzzed_configs: reads_or_is_refused]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tidegate.config.base import KeyPath

_MAX_SHOWN = 60
_MAX_VALUES = 200_000
"""The values of a file with its aliases written out. A list of every GPU of the largest cluster has a third of that;
nine lines of aliases of aliases have a billion."""


class AmbiguousYaml(ValueError):
    """YAML that a loader reads differently from its text: a key that occurs twice, or an alias that contains itself."""


@dataclass(frozen=True, slots=True)
class Document:
    value: object
    """None: the text is empty."""
    lines: Mapping[KeyPath, int]
    """The line of each key and item, counted from 1."""


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys here, as the text has them: later steps add the keys of a merge."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (name := (key.tag, key.value)) in first:
                lines = f"lines {first[name].start_mark.line + 1} and {key.start_mark.line + 1}"
                raise AmbiguousYaml(f"key {key.value!r} occurs twice, in {lines}: keep one")
            first[name] = key
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """yaml.YAMLError with the line. yaml's own raise many others, as for the date 2020-99-99 or `!!bool x`."""
        try:
            value = super().construct_object(node, deep=deep)
            # JSON escapes a character beyond 16 bits as two halves, which YAML's own constructor leaves apart.
            return value.encode("utf-16", "surrogatepass").decode("utf-16") if isinstance(value, str) else value
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{repr(node.value)[:_MAX_SHOWN]} is no {kind} ({error}); quote a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """The problem and its place in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} (0x{error.object[error.start]:02x}) is no text in UTF-8"
    return " ".join(str(error).split())


def read_yaml(text: str) -> Document:
    """AmbiguousYaml; yaml.YAMLError: the text is not YAML."""
    loader = _UniqueKeyLoader(text)
    try:
        return _document(loader)
    except RecursionError as error:
        raise AmbiguousYaml(
            "sections and lists are nested too deep to be read: no key of a config needs that"
        ) from error
    finally:
        loader.dispose()


def _document(loader: _UniqueKeyLoader) -> Document:
    node = loader.get_single_node()
    if node is None:
        return Document(None, {})
    # Cycles are refused before construction, since a constructed value could contain itself. Lines are read after it,
    # because it adds the keys of merges to the nodes.
    if _num_values(node, within=()) > _MAX_VALUES:
        raise AmbiguousYaml(f"its aliases stand for more than {_MAX_VALUES:,} values: write fewer")
    value = loader.construct_document(node)
    return Document(value, dict(_lines(node, ())))


def _num_values(node: yaml.Node, *, within: tuple[yaml.Node, ...]) -> int:
    """The values of the node, aliases written out. It stops counting above the limit. AmbiguousYaml: a cycle."""
    if any(node is outer for outer in within):
        line = node.start_mark.line + 1
        raise AmbiguousYaml(f"the value that begins in line {line} contains an alias of itself: write the value out")
    count = 1
    for child in _children(node):
        count += _num_values(child, within=(*within, node))
        if count > _MAX_VALUES:
            break
    return count


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
