"""Rows for people and for programs. Every command that shows something prints a table or one JSON value.

Invariant: both forms come from the same rows. JSON has numbers as numbers, the table has them in a form for people.
[test_command: jobs_are_listed_in_both_forms]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

Row = Mapping[str, Any]


class Form(StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    JSON = "json"


def show(rows: Sequence[Row], columns: Sequence[str], *, form: Form, out: TextIO, empty: str) -> None:
    """`columns` are the keys in order. A table without rows prints `empty` instead."""
    if form is Form.JSON:
        print(json.dumps([{column: row.get(column) for column in columns} for row in rows]), file=out)
    elif not rows:
        print(empty, file=out)
    else:
        print(table(rows, columns), file=out)


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
