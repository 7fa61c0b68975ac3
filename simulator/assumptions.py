"""What is assumed: fields of a scenario's sections, each with its value and the source of its default.

`P:` marks a source that is published, `F:` a value fitted to a published figure, `A:` an assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidegate.config.base import Section, fields_of


@dataclass(frozen=True, slots=True)
class Source:
    """Where a field's default comes from; what has none is no assumption."""

    text: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """A field as people read it; `source` is of the default."""

    key: str
    value: Any
    default: Any
    source: str


def assumptions_of(section: Section) -> Iterator[Assumption]:
    """In the order of the fields; of a section that is left out nothing is assumed."""
    for path, info in fields_of(type(section)):
        for mark in info.metadata:
            if isinstance(mark, Source) and (holder := _holder(section, path)) is not None:
                default = info.get_default(call_default_factory=True)
                yield Assumption(".".join(path), getattr(holder, path[-1]), default, mark.text)


def _holder(section: Section, path: tuple[str, ...]) -> Section | None:
    """The section of the path's last key; None where it, or one above it, is left out."""
    holder: Section | None = section
    for key in path[:-1]:
        holder = getattr(holder, key, None)
    return holder
