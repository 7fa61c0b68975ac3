"""Parts of a long benchmark, kept between its runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.parts import kept_in, part


def test_a_part_is_made_once_and_comes_back_the_same(tmp_path: Path) -> None:
    made = list[int]()

    def make(seed: int, *, is_long: bool) -> dict[str, object]:
        made.append(seed)
        return {"seconds": [0.1 + 0.2, 1 / 3], "seed": seed, "is_long": is_long, "sizes": (4, 8)}

    for _ in range(2):
        found = part(tmp_path / "own", "fixed order: base, seed 7", make, 7, is_long=True)
        assert found == {"seconds": [0.1 + 0.2, 1 / 3], "seed": 7, "is_long": True, "sizes": [4, 8]}
    assert made == [7]
    part(tmp_path / "own", "base, seed 7", make, 8, is_long=True)
    part(None, "base, seed 7", make, 9, is_long=True)
    part(None, "base, seed 7", make, 9, is_long=True)
    assert made == [7, 8, 9, 9]
    assert {each.suffix for each in (tmp_path / "own").iterdir()} == {".json"}


def test_a_part_that_fails_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        part(tmp_path, "half", lambda: 1 / 0)
    assert part(tmp_path, "half", lambda: 0.5) == 0.5


def test_parts_are_kept_for_a_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kept_in("own") is None, "no repository"

    def git(*words: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    first = kept_in("own")
    assert first is not None
    assert first.parent == Path("build/benchmarks/own")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "saved.json").write_text("{}")
    assert kept_in("own") == first
    (tmp_path / "code.py").write_text("2")
    assert kept_in("own") is None
    git("commit", "-am", "two")
    assert kept_in("own") not in (None, first)
