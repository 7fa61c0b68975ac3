"""Rows, and readers of the written files. The readers share no code with the writers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.tracking.metrics import Row


def a_row(step: int, *, incarnation: int = 1, **values: float) -> Row:
    named = {name.replace("__", "/"): value for name, value in values.items()} or {"iteration/loss": 0.25 * step}
    return Row(step, incarnation, 1000.0 + step, named)


@dataclass(frozen=True)
class Scalar:
    """A scalar as TensorBoard draws it."""

    step: int
    unix_s: float
    value: float


def read_scalars(folder: Path) -> dict[str, list[Scalar]]:
    """The scalars of all files of the folder, read in the order of names as TensorBoard does.

    A restart's first step drops earlier scalars from that step on. Raises AssertionError where a file is incomplete."""
    found: dict[str, list[Scalar]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        for event in map(_fields, _records(path.read_bytes())):
            step = event.get(2, [0])[0]
            if 7 in event and _fields(event[7][0])[1] == [1]:
                found = {tag: [scalar for scalar in old if scalar.step < step] for tag, old in found.items()}
            unix_s = struct.unpack("<d", event[1][0])[0]
            for value in map(_fields, _fields(event[5][0])[1] if 5 in event else []):
                scalar = struct.unpack("<f", value[2][0])[0]
                found.setdefault(value[1][0].decode(), []).append(Scalar(step, unix_s, scalar))
    return found


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a TFRecord file: each has its length, a checksum, the content, a checksum."""
    at = 0
    while at < len(content):
        header = content[at : at + 8]
        (length,) = struct.unpack("<Q", header)
        record = content[at + 12 : at + 12 + length]
        assert struct.unpack("<I", content[at + 8 : at + 12])[0] == _masked_crc32c(header)
        assert struct.unpack("<I", content[at + 12 + length : at + 16 + length])[0] == _masked_crc32c(record)
        yield record
        at += 16 + length


def _masked_crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _fields(message: bytes) -> dict[int, list[Any]]:
    """A protobuf message's values by field number: integers, and bytes for all other types."""
    fields: dict[int, list[Any]] = {}
    at = 0
    value: int | bytes
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
            case 2:
                length, at = _varint(message, at)
                value, at = message[at : at + length], at + length
            case kind:
                length = {1: 8, 5: 4}[kind]
                value, at = message[at : at + length], at + length
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def read_wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows in a run's `.wandb` file: 7 bytes, then a LevelDB log of protobuf records."""
    rows = []
    for record in map(_fields, _leveldb_records(file.read_bytes())):
        for history in map(_fields, record.get(2, [])):
            items = [_fields(item) for item in history[1]]
            rows.append({_key(item): json.loads(item[16][0]) for item in items})
    return rows


def _key(item: dict[int, list[Any]]) -> str:
    return str((item.get(1) or [b"/".join(item[2])])[0].decode())


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    at, parts = 7, b""
    while at + 7 <= len(content):
        remaining = 32768 - at % 32768
        if remaining < 7:
            at += remaining
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""
