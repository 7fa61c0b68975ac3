"""Files that grow by whole lines: the next line removes a line that was cut off, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.lines import append_lines

LONG = b"x" * 200_000


@pytest.mark.parametrize(
    ("before", "want"),
    [
        pytest.param(b"", b"", id="nothing"),
        pytest.param(b"one\ntwo\n", b"one\ntwo\n", id="whole lines"),
        pytest.param(b"one\ntw", b"one\n", id="a line that was cut off"),
        pytest.param(b"tw", b"", id="only that"),
        pytest.param(b"one\n" + LONG, b"one\n", id="a long one that was cut off"),
        pytest.param(LONG, b"", id="only a long one"),
        pytest.param(LONG + b"\n", LONG + b"\n", id="a long line"),
    ],
)
def test_lines_come_after_the_last_whole_one(tmp_path: Path, before: bytes, want: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(before)
    append_lines(path, b"new\nnewer\n")
    assert path.read_bytes() == want + b"new\nnewer\n"


def test_a_file_is_made_with_the_modes_of_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        append_lines(tmp_path / "lines", b"one\n")
    finally:
        os.umask(umask)
    assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_lines(Path("/dev/full"), b"one\n")
