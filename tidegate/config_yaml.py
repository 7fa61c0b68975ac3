"""The text of a config file -> what it holds, refused where YAML itself would guess: a key that is given twice.

Invariant: no value is dropped in silence. YAML's own loader keeps the last of two equal keys; here it is a fault that
names the key and both lines. Keys that a merge (`<<`) brings may still be given again, as YAML has it.
"""

from __future__ import annotations

from typing import Any

import yaml


class KeyGivenTwice(ValueError):
    """A mapping of the file holds a key twice."""


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
                raise KeyGivenTwice(f"key {key.value!r} is given twice, in {lines}: keep one")
            first[name] = key
        return node


def read_yaml(text: str) -> object:
    """KeyGivenTwice, or yaml.YAMLError when the text is not YAML."""
    return yaml.load(text, Loader=_UniqueKeyLoader)
