"""Writes tidegate/config.schema.json, with which editors check and complete configs: `make schema`.

The keys come from the config's sections. Their meanings come from the tables of docs/configuration.md. So nothing is
written twice. Every key has its meaning, also where two sections are of one kind. An unknown key is refused, as the
command refuses it. Only the command checks the rules between sections.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tidegate.config.base import ITEM
from tidegate.config.job_config import JobConfig

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "tidegate" / "config.schema.json"
PAGE = ROOT / "docs" / "configuration.md"
ROW = re.compile(r"^\| `([\w.\[\]]+)` \| ([^|]*) \| (\S[^|]*) \|$", re.MULTILINE)
"""Key, default and meaning."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_TASK_OR_DATA = [{"required": ["task"]}, {"required": ["data", "rewards"]}]


def meanings() -> dict[tuple[str, ...], str]:
    """The meaning of each key, by its path."""
    rows = ROW.findall(PAGE.read_text())
    return {tuple(key.replace(ITEM, f".{ITEM}").split(".")): _LINK.sub(r"\1", text) for key, _, text in rows}


def editor_schema(meaning_of: dict[tuple[str, ...], str]) -> dict[str, Any]:
    schema = JobConfig.model_json_schema()
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A job of Tidegate's"}
    return head | _inline(schema, (), schema["$defs"], meaning_of) | {"anyOf": _TASK_OR_DATA}


def text() -> str:
    return json.dumps(editor_schema(meanings()), indent=1) + "\n"


def _inline(
    schema: dict[str, Any], at: tuple[str, ...], defs: dict[str, Any], meaning_of: dict[tuple[str, ...], str]
) -> dict[str, Any]:
    """The schema without references, because the meaning of a section's keys depends on the section's place."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]] | schema
    made = {key: value for key, value in schema.items() if key not in ("title", "$defs", "$ref")}
    if "anyOf" in made:
        made["anyOf"] = [_inline(each, at, defs, meaning_of) for each in made["anyOf"]]
    if "items" in made:
        made["items"] = _inline(made["items"], (*at, ITEM), defs, meaning_of)
    for name, value in made.pop("properties", {}).items():
        path = (*at, name)
        meaning = {"description": meaning_of[path]} if path in meaning_of else {}
        made.setdefault("properties", {})[name] = _inline(value, path, defs, meaning_of) | meaning
    return made


if __name__ == "__main__":
    SCHEMA.write_text(text())
    print(f"{SCHEMA.relative_to(ROOT)} written")
