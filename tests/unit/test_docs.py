"""The pages agree with the code: every config key with its default, and every record of a choice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tidegate.config.base import fields_of
from tidegate.config.job_config import JobConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| `([\w.\[\]]+)` \| ([^|]*) \| \S", re.MULTILINE)


def as_documented(default: Any) -> str:
    """A default in the form of the page."""
    if default is None:
        return "`null`"
    if default == "":
        return "empty"
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def test_the_configuration_page_names_every_key_once_with_its_default() -> None:
    rows = ROW.findall((DOCS / "configuration.md").read_text())
    want = {
        ".".join(path).replace(".[]", "[]"): "required" if field.is_required() else as_documented(field.get_default())
        for path, field in fields_of(JobConfig)
    }
    assert dict(rows) == want
    assert len(rows) == len(want), "a key stands twice"


def test_a_default_of_a_section_is_the_default_of_its_keys() -> None:
    """Without this, the page's defaults would hold only where the section is written out."""
    for name, field in JobConfig.model_fields.items():
        if not field.is_required() and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            assert field.get_default() == field.annotation(), name


def test_records_of_choices_are_numbered_without_a_gap_listed_and_of_one_form() -> None:
    records = sorted(path.name for path in (DOCS / "adr").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    listed = re.findall(r"\]\((\d{4}-[^)]+\.md)\)", (DOCS / "adr" / "README.md").read_text())
    assert listed == records
    for name in records:
        headings = re.findall(r"^## (.+)$", (DOCS / "adr" / name).read_text(), re.MULTILINE)
        assert headings == ["Context", "Choice", "Rejected", "Consequence"], name
