"""A job's config for a person before a start: YAML with every key, and the origin of each value.

Invariant: the text is itself a config, of the same job. [test_dry_run: config_of_the_same_job]
"""

from __future__ import annotations

from typing import Any

import yaml

from tidegate.config.base import KeyPath
from tidegate.config.job_config import JobConfig
from tidegate.config.reading.layers import Layer
from tidegate.config.reading.yaml_text import read_yaml

_HEAD = "# Every key of the job. A comment says where a value was set; values without a comment are defaults."


class _OneLineDumper(yaml.SafeDumper):
    """Writes each value into the line of its key, so that a comment may follow it."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        is_one_line = text.splitlines() in ([], [text])
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_one_line else '"')


_OneLineDumper.add_representer(str, _OneLineDumper.represent_text)


def yaml_with_origins(config: JobConfig, values_set: Layer) -> str:
    """`values_set` are the values that the config was made of."""
    values: Any = config.model_dump(mode="json")
    text = yaml.dump(values, Dumper=_OneLineDumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    # The last key of a line is the innermost: `- name: exact_match` begins an item and a key.
    written: dict[int, KeyPath] = {line: at for at, line in read_yaml(text).lines.items()}
    lines = enumerate(text.splitlines(), 1)
    return "\n".join([_HEAD, *(_with_comment(line, written.get(number), values_set) for number, line in lines)])


def _with_comment(line: str, at: KeyPath | None, values_set: Layer) -> str:
    origin = values_set.origins.get(at) if at is not None else None
    # A section's own line says nothing that its keys do not.
    return line if origin is None or line.endswith(":") else f"{line}  # {origin.place}"
