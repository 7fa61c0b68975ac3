"""A folder is replaced as a whole, and a kill between the renames loses neither version."""

from __future__ import annotations

import os
from pathlib import Path

from tidegate.folder_swap import empty_partial, recover, swap_in


def written(folder: Path, text: str) -> Path:
    partial = empty_partial(folder)
    (partial / "file").write_text(text)
    return partial


def test_the_new_folder_takes_the_place_of_the_old_one_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    for text in ("old", "new"):
        swap_in(written(folder, text), folder)
    assert (folder / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["kept"]


def test_the_rest_of_an_unfinished_write_is_no_part_of_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    (written(folder, "half") / "more").touch()
    swap_in(written(folder, "whole"), folder)
    assert os.listdir(folder) == ["file"]


def test_a_kill_between_the_renames_leaves_the_old_one_to_be_found(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    swap_in(written(folder, "old"), folder)
    written(folder, "new")
    os.rename(folder, tmp_path / ".kept.former")
    recover(folder)
    assert (folder / "file").read_text() == "old"
    swap_in(written(folder, "newer"), folder)
    recover(folder)
    assert (folder / "file").read_text() == "newer"
