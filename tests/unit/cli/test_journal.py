"""What a job's journal tells the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.launcher.journal import newest_incarnation


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ([], 0),
        ([b'{"update": "1.0.0"}', b'{"update": "3.2.1"}'], 3),
        ([b'{"update": "3.2.1"}', b'{"update": "4.'], 3),
        ([b"\xff", b"[]", b'{"update": 7}', b'{"update": "x.1.1"}'], 0),
    ],
)
def test_the_last_whole_line_has_the_newest_incarnation(tmp_path: Path, lines: list[bytes], want: int) -> None:
    (journal := tmp_path / "journal.jsonl").write_bytes(b"\n".join(lines))
    assert newest_incarnation(journal) == want


def test_a_job_without_a_journal_has_none(tmp_path: Path) -> None:
    assert newest_incarnation(tmp_path / "journal.jsonl") == 0
