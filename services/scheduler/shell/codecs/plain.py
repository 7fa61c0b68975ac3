"""Convert frozen values to plain JSON values, and back by their annotations. Pure.

The values are dataclasses of numbers, texts, bytes, choices, tuples, maps and such dataclasses. Each may be None.
A union of dataclasses is a sum type: each of its classes has a `CASE`, which JSON has under the key `case`.

Invariants:
- `from_plain(kind, to_plain(value), ...) == value`. [test_codec: every_state_of_a_job]
- A value of another kind is refused with a ValueError that names the place.
  [test_codec: bytes_that_hold_no_state]
"""

from __future__ import annotations

import base64
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_PLAIN = frozenset({bool, int, float, str})
"""Types that JSON holds unchanged."""


def to_plain(value: object) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    kind: Any = type(value)
    if (names := _field_names(kind)) is not None:
        plain = {name: to_plain(getattr(value, name)) for name in names}
        return plain if (case := _case(kind)) is None else {"case": case, **plain}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        # A fast path: columns hold thousands of numbers.
        return list(value) if _PLAIN.issuperset(map(type, value)) else [to_plain(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


@cache
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for another type."""
    return tuple(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@cache
def _case(kind: Any) -> str | None:
    return getattr(kind, "CASE", None)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Make a value of the annotated `kind` from a JSON value. `where` is its place, for error messages."""
    kind = getattr(kind, "__supertype__", kind)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        kinds = [each for each in get_args(kind) if each is not type(None)]
        return from_plain(kinds[0] if len(kinds) == 1 else _kind_of(kinds, value, where), value, where)
    if origin is tuple:
        return _typed_tuple(get_args(kind), value, where)
    if origin is not None and issubclass(origin, Mapping):
        key_kind, value_kind = get_args(kind)
        items = _expect(dict, value, where).items()
        pairs = [(_key(key_kind, key, where), from_plain(value_kind, each, f"{where}.{key}")) for key, each in items]
        return dict(pairs)
    if dataclasses.is_dataclass(kind):
        return _typed_dataclass(kind, value, where)
    if kind is bytes:
        text = _expect(str, value, where)
        return _made(where, lambda: base64.b64decode(text, validate=True))
    if issubclass(kind, StrEnum):
        text = _expect(str, value, where)
        return _made(where, lambda: kind(text))
    if kind is float and type(value) is int:
        return _made(where, lambda: float(value))
    return _expect(kind, value, where)


def _made(where: str, make: Callable[[], Any]) -> Any:
    """The value. ValueError names the place of one that its type does not allow."""
    try:
        return make()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


def _typed_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    items = _expect(list, value, where)
    if args[-1] is Ellipsis and args[0] in _PLAIN and set(map(type, items)) <= {args[0]}:
        return tuple(items)
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(items):
        raise ValueError(f"{where} holds {len(items)} items, it must hold {len(kinds)}")
    return tuple(
        from_plain(kind, each, f"{where}[{index}]") for index, (kind, each) in enumerate(zip(kinds, items, strict=True))
    )


def _kind_of(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """The class of a sum type that has the value's case."""
    found = _expect(dict, value, where).get("case")
    for kind in kinds:
        if found is not None and _case(kind) == found:
            return kind
    raise ValueError(
        f"{where} is the case {found!r}, it must be one of {', '.join(str(_case(kind)) for kind in kinds)}"
    )


def _typed_dataclass(kind: Any, value: Any, where: str) -> Any:
    fields = _expect(dict, value, where)
    hints = _hints(kind)
    names = _field_names(kind) or ()
    want = {*names} if _case(kind) is None else {*names, "case"}
    if fields.keys() != want:
        odd = ", ".join(sorted(set(fields) ^ want))
        raise ValueError(f"{where} does not hold the fields of {kind.__name__}: {odd} missing or unknown")
    values = {name: from_plain(hints[name], fields[name], f"{where}.{name}") for name in names}
    return _made(where, lambda: kind(**values))


def _key(kind: Any, key: str, where: str) -> Any:
    kind = getattr(kind, "__supertype__", kind)
    if kind is int:
        if not key.isdecimal():
            raise ValueError(f"{where} has the key {key!r}, it must be a number")
        return _made(where, lambda: int(key))
    return _made(where, lambda: kind(key))


def _expect(kind: type[T], value: Any, where: str) -> T:
    if type(value) is not kind:
        raise ValueError(f"{where} is {type(value).__name__}, it must be {kind.__name__}")
    return value
