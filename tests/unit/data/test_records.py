"""Records of JSONL and Parquet files have their place. A fault is reported with its file and line."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidegate.data.records import data_files, read_records

ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "answer": 1},
    {"prompt": "two", "answer": None},
    {"prompt": "three", "tags": ["a", {"b": 2.5}]},
]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> tuple[list[tuple[str, Any]], list[str]]:
    faults: list[str] = []
    return [(record.where, dict(record.columns)) for record in read_records(path, faults)], faults


def write_parquet(path: Path, rows: list[dict[str, Any]], *, row_group_size: int = 2) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="what requirements/data.txt lists is not installed")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def test_each_line_is_a_record_that_knows_its_place(tmp_path: Path) -> None:
    path = lines(tmp_path / "train.jsonl", ROWS)
    assert read(path) == ([(f"{path}:{number}", row) for number, row in enumerate(ROWS, start=1)], [])


def test_blank_lines_a_byte_order_mark_and_foreign_line_ends_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\n   \n')
    assert read(path) == ([(f"{path}:1", {"prompt": "a"}), (f"{path}:3", {"prompt": "b"})], [])


BAD_LINES = {
    "an object that is cut off": (b'{"prompt": "a"', r"not JSON at column 15: .* each line is one object"),
    "a trailing comma": (b'{"prompt": "a",}', r"not JSON at column \d+: "),
    "a list": (b'["a"]', r"not an object but \['a'\]: each line is one object of columns"),
    "a text": (b'"a"', r"not an object but 'a'"),
    "another encoding": ('{"prompt": "für"}'.encode("latin-1"), r"not UTF-8 at byte 14: save the file as UTF-8"),
    "more brackets than can be read": (b"[" * 100_000, r"nested too deeply"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_reported_with_its_file_and_number_and_the_others_are_read(case: str, tmp_path: Path) -> None:
    bad, want = BAD_LINES[case]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + bad + b'\n{"prompt": "b"}\n')
    records, faults = read(path)
    assert [where for where, _ in records] == [f"{path}:1", f"{path}:3"]
    (fault,) = faults
    assert re.match(f"{path}:2: .*{want}", fault)


def test_parquet_rows_are_the_same_records_as_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {n}", "answer": n, "info": {"truth": [n, n + 1]}} for n in range(5)]
    path = write_parquet(tmp_path / "train.parquet", rows)
    assert read(path) == ([(f"{path} row {n}", row) for n, row in enumerate(rows, start=1)], [])


def test_parquet_columns_that_json_cannot_hold_are_left_out(tmp_path: Path) -> None:
    row = {"prompt": "a", "picture": b"\x89PNG", "day": datetime.date(2026, 1, 1), "nested": [{"raw": b"x"}]}
    path = write_parquet(tmp_path / "train.parquet", [row])
    assert read(path) == ([(f"{path} row 1", {"prompt": "a"})], [])


def test_an_incomplete_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", ROWS[:1])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train\.parquet cannot be read as Parquet after row 0: .*; is it whole\?"):
        read(path)


def test_without_pyarrow_a_parquet_file_is_refused_with_the_packages_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.modules['pyarrow'] = None\n"
        "from tidegate.data.records import read_records\n"
        "list(read_records(Path('train.parquet'), []))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd())
    assert "ValueError: train.parquet is a Parquet file, and pyarrow is not installed: install what" in ran.stderr


LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "files named for their split": (["train.jsonl", "test.jsonl"], ["train.jsonl"]),
    "parts in order of name": (
        ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
    ),
    "other files are no data": (["train.jsonl", "README.md", "trainer_state.json", "training.jsonl"], ["train.jsonl"]),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_folder_stands_for_the_files_of_the_split(case: str, tmp_path: Path) -> None:
    there, want = LAYOUTS[case]
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert data_files(tmp_path, split="train") == tuple(tmp_path / name for name in want)


def test_a_path_without_data_is_refused_with_the_legal_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data at .*absent.jsonl: give the path of a \.jsonl or \.parquet file"):
        data_files(tmp_path / "absent.jsonl", split="train")
    with pytest.raises(ValueError, match=r"has no files of the split train, such as train\.jsonl or data/train-00000"):
        data_files(tmp_path, split="train")
    (tmp_path / "train.csv").touch()
    with pytest.raises(ValueError, match=r"train\.csv is not a \.jsonl or \.parquet file"):
        data_files(tmp_path / "train.csv", split="train")
    for kind in ("jsonl", "parquet"):
        (tmp_path / f"train.{kind}").touch()
    with pytest.raises(ValueError, match=r"has train in both \.jsonl and \.parquet: give the path of one file"):
        data_files(tmp_path, split="train")
