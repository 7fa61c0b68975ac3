"""Which folders in host memory were left, and that they go."""

from __future__ import annotations

import os
from pathlib import Path

from cli.doctor import Health, host_memory
from tidegate.launcher.left_memory import Removals, left_by_launchers
from tidegate.launcher.lock import LOCK, held


def folder(root: Path, name: str, *, locked: bool = True) -> Path:
    made = root / name
    made.mkdir()
    if locked:
        (made / LOCK).touch()
        os.utime(made / LOCK, (0, 0))
    return made


def own(name: str) -> str:
    return f"tidegate-{os.getuid()}-{name}"


def test_a_folder_whose_launcher_lives_is_not_taken_for_left(tmp_path: Path) -> None:
    lives, left, begins = (folder(tmp_path, own(name)) for name in ("a1", "b2", "b3"))
    os.utime(begins / LOCK)
    (left / "version").write_bytes(bytes(1 << 20))
    folder(tmp_path, own("c3"), locked=False)
    folder(tmp_path, "tidegate-999999-d4")
    (tmp_path / own("e5")).write_text("a file")
    (tmp_path / own("f6")).symlink_to(left)
    with held(lives / LOCK, ValueError):
        assert [*left_by_launchers(tmp_path)] == [left]
        found = host_memory(tmp_path)
    assert found.health is Health.WARN
    assert "MiB free; jobs whose launcher was killed left 1 MiB" in found.found
    assert found.remedy == f"start them again, or rm -r {left}"


def test_what_is_removed_is_gone_at_once_and_a_removal_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    left, cut_off = folder(tmp_path, own("a1")), folder(tmp_path, f".{own('b2')}-77")
    other = folder(tmp_path, ".tidegate-999999-c3-77")
    removals = Removals()
    removals.begin(left)
    assert not left.exists()
    removals.begin(left)
    removals.go_on(tmp_path)
    removals.finish()
    assert [*tmp_path.iterdir()] == [other]
    assert not cut_off.exists()
