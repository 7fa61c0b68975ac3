"""Rows for people and for programs. Every command that shows something prints a table, or one value as JSON or YAML.

Invariants:
- All forms come from the same rows. JSON and YAML have numbers as numbers, the table has them in a form for people.
  [test_command: jobs_are_listed_in_both_forms]
- JSON and YAML hold the same value. [test_command: yaml_holds_the_same]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

import yaml

MOST_ROWS = 30
"""The rows of a table that stands below a run's output. More would push what was said before it off the screen."""
_NUM_DIGITS = 6
"""Digits of a mean in JSON and YAML: more than a person compares, fewer than the sixteen of a division."""

Row = Mapping[str, Any]


class Form(StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def show(rows: Sequence[Row], columns: Sequence[str], *, form: Form, out: TextIO, empty: str) -> None:
    """`columns` are the keys in order. A table without rows prints `empty` instead."""
    if form is not Form.TABLE:
        print(written([{column: row.get(column) for column in columns} for row in rows], form), file=out)
    elif not rows:
        print(empty, file=out)
    else:
        print(table(rows, columns), file=out)


def written(value: Any, form: Form) -> str:
    """`value` in the form of a program: one line of JSON, or lines of YAML."""
    text = json.dumps(value)
    # From JSON, whose values are plain: YAML would write the class of a StrEnum.
    return text if form is Form.JSON else yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True).rstrip()


def answer_text(row: Row, text: str, form: Form) -> str:
    """What a command did: `text` for people, `row` for programs."""
    return text if form is Form.TABLE else written(row, form)


def rounded(value: float) -> float:
    """A figure that is a mean, to six digits. Digits before the point stay."""
    if not value or not math.isfinite(value):
        return value
    return round(value, max(0, _NUM_DIGITS - 1 - math.floor(math.log10(abs(value)))))


def cut_table(rows: Sequence[Row], columns: Sequence[str], *, rest: str) -> str:
    """As `table`, with the first and the last of more than `MOST_ROWS` rows. `rest` says where the others are."""
    if len(rows) <= MOST_ROWS:
        return table(rows, columns)
    half = MOST_ROWS // 2
    head, *lines = table([*rows[:half], *rows[-half:]], columns).splitlines()
    gap = f"... {len(rows) - 2 * half} rows are left out here: {rest}"
    return "\n".join([head, *lines[:half], gap, *lines[half:]])


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Columns are as wide as their widest cell, and numbers stand to the right."""
    heads = [column.replace("_", " ").upper() for column in columns]
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in [heads, *cells]) for index in range(len(columns))]
    right = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), *(line(texts) for texts in cells)])


def cell(value: Any) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list() | tuple():
            return ",".join(map(cell, value))
        case _:
            return str(value)
