"""What an editor reports about a config by its JSON schema: only the keywords of draft 7 that our schema uses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
SAYS_NOTHING = {"$schema", "title", "description", "default"}
READ = {"type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "anyOf", "required"}
READ |= {"properties", "additionalProperties", "items", "minItems", "maxItems"}
OUTSIDE: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.lt,
    "maximum": operator.gt,
    "exclusiveMinimum": operator.le,
    "exclusiveMaximum": operator.ge,
}


def complaints(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """Yields the first fault at each place as `key: keyword of the schema`."""
    assert not schema.keys() - READ - SAYS_NOTHING, f"{at}: {schema.keys() - READ - SAYS_NOTHING}"
    if wrong := next(_wrong(value, schema), None):
        yield f"{at or 'config'}: {wrong}"
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, inner in value.items():
            path = f"{at}.{key}".lstrip(".")
            if key in known or isinstance(others, dict):
                yield from complaints(inner, known.get(key, others), path)
            elif not others:
                yield f"{path}: additionalProperties"
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from complaints(inner, schema.get("items", {}), f"{at}.{index}")


def _wrong(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    if "type" in schema and not _is(value, schema["type"]):
        yield "type"
    if "enum" in schema and value not in schema["enum"]:
        yield "enum"
    if "anyOf" in schema and all(list(complaints(value, option)) for option in schema["anyOf"]):
        yield "anyOf"
    yield from (f"required {key}" for key in schema.get("required", ()) if key not in value)
    yield from (word for word, is_outside in OUTSIDE.items() if word in schema and is_outside(value, schema[word]))
    if isinstance(value, list) and not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield "minItems, maxItems"


def _is(value: Any, name: str) -> bool:
    return isinstance(value, TYPES[name]) and not (isinstance(value, bool) and name in ("integer", "number"))
