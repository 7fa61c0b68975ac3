"""The files of a data set, and their records: JSON lines, or the rows of Parquet files.

A path is a file, or a folder in the layout of Hugging Face `datasets`: files named for their split, in the folder or in
its `data` subfolder. Files are read in the order of their names, and records in their order.

Invariants:
- A record has its file and its line or row. [test_records: record_that_knows_its_place]
- A faulty line is reported with its file and number, and the other lines are read. [test_records: bad_line_is_reported]
- All values fit JSON; other values are left out. [test_records: json_cannot_hold_are_left_out]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.json_text import parse_json

KINDS = (".jsonl", ".parquet")
TRAINING_SPLIT = "train"
"""The files of a folder that a job trains on."""
_ROWS_AT_ONCE = 1024
_INSTALL_PYARROW = "install what requirements/data.txt lists (it has pyarrow), or convert it to .jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """A record. `where` is its place for messages, such as `data/train.jsonl:12`."""

    where: str
    columns: Mapping[str, Any]


def data_files(path: Path, *, split: str) -> tuple[Path, ...]:
    """The files of a split, by name. Raises ValueError when there are none, or when they are of two kinds."""
    if path.is_file():
        if path.suffix not in KINDS:
            raise ValueError(f"{path} is not a {' or '.join(KINDS)} file: convert it to one of them")
        return (path,)
    if not path.is_dir():
        raise ValueError(f"no data at {path}: give the path of a {' or '.join(KINDS)} file, or of a folder of them")
    named = re.compile(rf"{re.escape(split)}([-_.].*)?")
    for folder in (path, path / "data"):
        found = sorted(each for each in folder.glob("*") if each.suffix in KINDS and named.fullmatch(each.stem))
        if len({each.suffix for each in found}) > 1:
            raise ValueError(
                f"{folder} has {split} in both {' and '.join(KINDS)}: give the path of one file, or remove a kind"
            )
        if found:
            return tuple(found)
    raise ValueError(
        f"{path} has no files of the split {split}, such as {split}.jsonl or data/{split}-00000-of-00001.parquet: give "
        "the path of a file, or of a folder that has them"
    )


def read_records(file: Path, faults: list[str]) -> Iterator[Record]:
    """The records of one file. A faulty line is added to `faults`. Raises ValueError where the file cannot be read."""
    return _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file, faults)


def _read_lines(file: Path, faults: list[str]) -> Iterator[Record]:
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                where = f"{file}:{number}"
                # Remove the byte order mark that some editors put before the first line.
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not content.strip():
                    continue
                try:
                    yield Record(where, _object(content.rstrip()))
                except ValueError as error:
                    faults.append(f"{where}: {error}")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at column {error.colno}: {error.msg}; each line is one object") from error
    except UnicodeEncodeError as error:
        raise ValueError("not Unicode: it has one half of a character that takes two escapes (\\ud800)") from error
    except ValueError as error:
        raise ValueError(f"not JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"not an object but {found!r:.60}: each line is one object of columns, such as {{'prompt': ...}}"
        )
    return found


def _read_parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{file} is a Parquet file, and pyarrow is not installed: {_INSTALL_PYARROW}") from error
    try:
        row = 0
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False):
                for columns in batch.to_pylist():
                    row += 1
                    kept = {name: value for name, value in columns.items() if _fits_json(value)}
                    yield Record(f"{file} row {row}", kept)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet after row {row}: {error}; is it whole?") from error


def _fits_json(value: object) -> bool:
    """Whether JSON can hold this value. It cannot hold bytes (such as images) or times."""
    if isinstance(value, dict):
        return all(_fits_json(item) for item in value.values())
    if isinstance(value, list):
        return all(_fits_json(item) for item in value)
    return value is None or isinstance(value, (str, int, float))
