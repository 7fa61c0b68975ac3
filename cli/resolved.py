"""A config as a person reads it before a start: YAML with every key, and where each value comes from.

Invariant: what is printed is itself a config, of the same job.
"""

from __future__ import annotations

from typing import Any

import yaml

from tidegate.config.base import KeyPath
from tidegate.config.job_config import JobConfig
from tidegate.config.reading.layers import Layer
from tidegate.config.reading.yaml_text import read_yaml

_HEAD = "# Every key of the job. A comment tells where the value was given; the others are defaults."


class _OneLineDumper(yaml.SafeDumper):
    """Each value ends in the line of its key, so that a comment may follow it."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        is_one_line = text.splitlines() in ([], [text])
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_one_line else '"')


_OneLineDumper.add_representer(str, _OneLineDumper.represent_text)


def resolved_yaml(config: JobConfig, given: Layer) -> str:
    """`given` are the values that the config was made of."""
    values: Any = config.model_dump(mode="json")
    text = yaml.dump(values, Dumper=_OneLineDumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    # The innermost key of a line is the last one: `- name: exact_match` begins an item and a key.
    written: dict[int, KeyPath] = {line: at for at, line in read_yaml(text).lines.items()}
    return "\n".join([_HEAD, *(_commented(line, written.get(n), given) for n, line in enumerate(text.splitlines(), 1))])


def _commented(line: str, at: KeyPath | None, given: Layer) -> str:
    origin = given.origins.get(at) if at is not None else None
    # A section's own line tells nothing that its keys do not.
    return line if origin is None or line.endswith(":") else f"{line}  # {origin.place}"
