"""The assumptions of a scenario: fields of its sections, each with its value and the source of its default.

`P:` marks a published source, `F:` a value that is fitted to a published figure, `A:` an assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidegate.config.base import Section, fields_of


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a field's default. A field without one is no assumption."""

    text: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """A field for people to read. `source` is the source of the default."""

    key: str
    value: Any
    default: Any
    source: str


def assumptions_of(section: Section) -> Iterator[Assumption]:
    """The assumptions of a section in the order of its fields. A section that is left out has none."""
    for path, info in fields_of(type(section)):
        for mark in info.metadata:
            if isinstance(mark, Source) and (holder := _holder(section, path)) is not None:
                default = info.get_default(call_default_factory=True)
                yield Assumption(".".join(path), getattr(holder, path[-1]), default, mark.text)


def _holder(section: Section, path: tuple[str, ...]) -> Section | None:
    """The section with the path's last key. None: this section or one above it is left out."""
    holder: Section | None = section
    for key in path[:-1]:
        holder = getattr(holder, key, None)
    return holder
