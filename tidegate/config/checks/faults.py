"""A fault that pydantic found in a config -> one line for the person who wrote the config.

A line gives the dotted key, its value or the missing value, and the legal values. The reader needs no pydantic.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel

from tidegate.config.base import section_of

_LEAST_LIKENESS = 0.5
"""The smallest ratio of difflib (0 to 1) at which a message names a word as the nearest known one.

Below it two words share only a few letters, and the hint would mislead.
"""


def fault_line(root: type[BaseModel], fault: Any) -> str:
    """`fault` is one of `ValidationError.errors()`, from the validation of a value as a `root`."""
    return _plain_line(root, fault) + _null_hint(root, fault)


def _plain_line(root: type[BaseModel], fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            return _unknown_key(where, str(fault["loc"][-1]), _known_section(root, fault["loc"][:-1]))
        case "missing":
            return f"key {where!r} is missing: it has no default"
        case "value_error":
            return str(fault["ctx"]["error"])
        case "model_type":
            section = _known_section(root, fault["loc"])
            return _no_section(where or "the config", fault["input"], f"{next(iter(section.model_fields))}:")
        case "dict_type":
            return _no_section(where, fault["input"], "n0: 4")
        case "tuple_type":
            return f"{where} must be a list such as - name: exact_match, found {fault['input']!r}"
    return f"{where}={fault['input']!r}: {fault['msg']}{_nearest_word(fault)}"


def _nearest_word(fault: Any) -> str:
    """A hint at the legal word that is nearest to the text; empty where none is near."""
    if fault["type"] not in ("literal_error", "enum") or not isinstance(fault["input"], str):
        return ""
    known = re.findall(r"'([^']+)'", fault["ctx"]["expected"])
    near = difflib.get_close_matches(fault["input"], known, n=1, cutoff=_LEAST_LIKENESS)
    return f"; the nearest is {near[0]!r}" if near else ""


def _null_hint(root: type[BaseModel], fault: Any) -> str:
    """For `none` at a key that may be without a value: YAML reads that word as a text."""
    if not fault["loc"] or str(fault["input"]).lower() != "none" or fault["type"] == "extra_forbidden":
        return ""
    *parents, name = fault["loc"]
    section = _section_at(root, tuple(parents))
    # A mapping of names, such as cluster.nodes, is no section.
    field = section.model_fields.get(str(name)) if section is not None else None
    may_be_null = field is not None and type(None) in get_args(field.annotation)
    return "; write null for no value" if may_be_null else ""


def _unknown_key(where: str, name: str, section: type[BaseModel]) -> str:
    known = sorted(section.model_fields)
    near = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_LIKENESS)
    hint = f"; the nearest known key is {near[0]!r}" if near else ""
    return f"unknown key {where!r}{hint} (known here: {', '.join(known)})"


def _no_section(where: str, value: object, example: str) -> str:
    found = "nothing" if value is None else repr(value)
    return f"{where} must hold keys and values such as {example}, found {found}"


def _known_section(root: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    section = _section_at(root, path)
    assert section is not None, f"{path} is not a section"
    return section


def _section_at(root: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """None: the path leads to a plain value, or into one."""
    section: type[BaseModel] | None = root
    for part in path:
        # A number is a place in a list. `section` is the type of the list's items already.
        if isinstance(part, str):
            field = section.model_fields.get(part) if section is not None else None
            section = section_of(field.annotation) if field is not None else None
    return section
