"""What a fuzzed decoder is given, and how it may answer.

- `messages` makes any message of a schema: every field, numbers at their limits, odd texts, enum numbers of no name.
- `damaged_bytes` takes real bytes and flips, cuts, doubles, moves or splices them.
- `damaged_json` takes a real JSON value, swaps values for others, and removes or adds keys.
- `value_or_refusal` is the oracle: a decoder gives a value, or raises its documented error with a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests import effort

M = TypeVar("M", bound=Message)
X = TypeVar("X")
Y = TypeVar("Y")

fuzzed = settings(
    max_examples=4000 if effort.IS_FULL else 100,
    deadline=None,
    # An example writes its file over that of the example before.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
"""How many examples a decoder is given."""
_MAX_FIELDS = 8
_MAX_ITEMS = 3
_MAX_DEPTH = 5
_MAX_BLOWS = 3

_F = FieldDescriptor
_LIMITS = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), (-(2**31), 2**31 - 1)),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), (-(2**63), 2**63 - 1)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), (0, 2**32 - 1)),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), (0, 2**64 - 1)),
}
_ENUM_LIMITS = (-(2**31), 2**31 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORDS = (
    "", "/", "n0/0", "n0/1", "n1/0", "n0/00", "n0/-1", "n0/\u0663", "n0/" + "9" * 5000, "../x", ".", "n0",
    "actor@n0", "rollout@n0", "inference@n0", "@", "a/b", "tide", "bench", "\0", "{}", "[]",
)  # fmt: skip
"""Texts that mean something to a decoder, or nearly do."""


@st.composite
def messages(draw: st.DrawFn, kind: type[M], *, words: Sequence[str] = WORDS, whole: bool = False) -> M:
    """A message of this kind. `words` are likely texts. `whole`: every field is set, so that more of it is read."""
    made = kind()
    _fill(draw, made, words, _MAX_DEPTH, whole=whole)
    return made


def _fill(draw: st.DrawFn, message: Message, words: Sequence[str], depth: int, *, whole: bool) -> None:
    fields: list[Any] = [field for field in message.DESCRIPTOR.fields if depth or field.message_type is None]
    some = st.lists(st.sampled_from(fields), unique=True, max_size=_MAX_FIELDS) if fields else st.just([])
    for field in fields if whole else draw(some):
        held, inner = getattr(message, field.name), field.message_type
        num_items = draw(st.integers(0, _MAX_ITEMS)) if field.is_repeated else 1
        for _ in range(num_items):
            if inner is not None and inner.GetOptions().map_entry:
                key, value = (draw(scalars(inner.fields_by_name[name], words)) for name in ("key", "value"))
                held[key] = value
            elif inner is not None:
                part = held.add() if field.is_repeated else held
                part.SetInParent()
                _fill(draw, part, words, depth - 1, whole=whole)
            elif field.is_repeated:
                held.append(draw(scalars(field, words)))
            else:
                setattr(message, field.name, draw(scalars(field, words)))


def scalars(field: FieldDescriptor, words: Sequence[str] = WORDS) -> st.SearchStrategy[Any]:
    """The values of a field that holds no message."""
    match field.type:
        case _F.TYPE_BOOL:
            return st.booleans()
        case _F.TYPE_STRING:
            return st.sampled_from(words) | TEXTS
        case _F.TYPE_BYTES:
            return st.binary(max_size=12)
        case _F.TYPE_DOUBLE:
            return st.sampled_from([0.0, 1.0, 0.5]) | st.floats()
        case _F.TYPE_FLOAT:
            return st.sampled_from([0.0, 1.0, 0.5]) | st.floats(width=32)
        case _F.TYPE_ENUM:
            assert field.enum_type is not None, "the field is of an enum"
            known = [value.number for value in field.enum_type.values]
            return st.sampled_from([*known, 77, *_ENUM_LIMITS])
        case _:
            least, most = _LIMITS[field.type]
            return st.integers(max(least, -4), 4) | st.sampled_from([least, most]) | st.integers(least, most)


@st.composite
def damaged_bytes(draw: st.DrawFn, originals: Sequence[bytes]) -> bytes:
    """Real bytes after one to three blows."""
    data = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, _MAX_BLOWS))):
        start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        part, other = data[start:end], draw(st.sampled_from(originals))
        match draw(st.sampled_from(["flip", "cut", "remove", "double", "move", "splice", "insert"])):
            case "flip" if data:
                at = min(start, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
            case "cut":
                data = data[:start]
            case "remove":
                data = data[:start] + data[end:]
            case "double":
                data = data[:end] + part + data[end:]
            case "move":
                data = part + data[:start] + data[end:]
            case "splice":
                data = data[:start] + other[draw(st.integers(0, len(other))) :]
            case _:
                data = data[:start] + draw(st.binary(min_size=1, max_size=8)) + data[start:]
    return data


ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, -0.0, 1e300, float("inf"), float("nan"), 2**31, 2**63, 2**64, 10**400,
    "", "x", "1", "n0/0", "\ud800", "\0", "../x", [], {}, [[]], [None], [1, 2], {"a": 1}, {"": None}, "\u0663",
)  # fmt: skip
ODD_TEXTS = (
    b"", b"{}", b"[]", b"null", b"1", b'"x"', b"NaN", b"1e999", b"-", b"{",
    b"\xff\xfe", b'"\\ud800"', b"\xef\xbb\xbf{}",
    b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"1" * 4000, b"[" + b"9" * 5000 + b"]",
)  # fmt: skip
"""JSON and near-JSON, nested or long beyond what a reader takes."""


@st.composite
def damaged_values(draw: st.DrawFn, originals: Sequence[Any]) -> Any:
    """A real JSON value with one to three of its parts swapped, removed, added or doubled."""
    root = [deepcopy(draw(st.sampled_from(originals)))]
    for _ in range(draw(st.integers(1, _MAX_BLOWS))):
        held, key = draw(_places(root))
        value = held[key]
        match draw(st.sampled_from(["swap", "swap", "remove", "add", "double", "nudge"])):
            case "swap":
                held[key] = deepcopy(draw(st.sampled_from(ODD_VALUES)))
            case "remove" if held is not root:
                del held[key]
            case "add" if isinstance(value, dict):
                value[draw(st.sampled_from(["", "x", "format", "a.b"]))] = draw(st.sampled_from([None, 1, "x"]))
            case "double" if isinstance(value, list) and value:
                value.append(deepcopy(value[0]))
            case "nudge" if isinstance(value, int | float):
                held[key] = value + draw(st.sampled_from([-1, 1]))
            case _:
                held[key] = draw(st.integers() | TEXTS)
    return root[0]


@st.composite
def _places(draw: st.DrawFn, root: list[Any]) -> tuple[Any, Any]:
    """A container and the key of one of its values, at any depth."""
    held: Any = root
    key: Any = 0
    while isinstance(held[key], dict | list) and held[key] and draw(st.integers(0, 3)):
        held = held[key]
        key = draw(st.sampled_from(sorted(held) if isinstance(held, dict) else range(len(held))))
    return held, key


def damaged_json(originals: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """The bytes of damaged values, real values as damaged bytes, and odd texts."""
    written = [json.dumps(each).encode() for each in originals]
    damaged = damaged_values(originals).map(lambda value: json.dumps(value).encode())
    return damaged | damaged_bytes(written) | st.sampled_from(ODD_TEXTS)


def value_or_refusal(decode: Callable[[X], Y], given: X, *refusals: type[Exception]) -> Y | None:
    """The value. None where the decoder refused with one of its documented errors, which says why."""
    try:
        return decode(given)
    except refusals as refusal:
        said = str(refusal).strip()
    assert said, "a refusal says why"
    return None
