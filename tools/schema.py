"""Writes tidegate/config.schema.json, by which editors check and complete configs: `make schema`.

What may be written comes from the config's sections, what it means from the tables of docs/configuration.md, so that
neither is told twice. Invariants: every key has its meaning, also where two sections are of one kind; a key that is not
listed is refused, as the command refuses it. What must hold between sections is checked by the command alone.
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
    """Of each key, by its path."""
    rows = ROW.findall(PAGE.read_text())
    return {tuple(key.replace(ITEM, f".{ITEM}").split(".")): _LINK.sub(r"\1", told) for key, _, told in rows}


def editor_schema(told: dict[tuple[str, ...], str]) -> dict[str, Any]:
    """`told` is what each key means."""
    schema = JobConfig.model_json_schema()
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A job of Tidegate's"}
    return head | _written_out(schema, (), schema["$defs"], told) | {"anyOf": _TASK_OR_DATA}


def text() -> str:
    return json.dumps(editor_schema(meanings()), indent=1) + "\n"


def _written_out(
    schema: dict[str, Any], at: tuple[str, ...], defs: dict[str, Any], told: dict[tuple[str, ...], str]
) -> dict[str, Any]:
    """Without references: what the keys of one kind of section mean depends on where it stands."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]] | schema
    made = {key: value for key, value in schema.items() if key not in ("title", "$defs", "$ref")}
    if "anyOf" in made:
        made["anyOf"] = [_written_out(each, at, defs, told) for each in made["anyOf"]]
    if "items" in made:
        made["items"] = _written_out(made["items"], (*at, ITEM), defs, told)
    for name, value in made.pop("properties", {}).items():
        path = (*at, name)
        meaning = {"description": told[path]} if path in told else {}
        made.setdefault("properties", {})[name] = _written_out(value, path, defs, told) | meaning
    return made


if __name__ == "__main__":
    SCHEMA.write_text(text())
    print(f"{SCHEMA.relative_to(ROOT)} written")
