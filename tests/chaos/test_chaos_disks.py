"""A folder that is a file system of its own gets full, and has room again. Only root can mount one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.chaos.disks import fill, make_room, mounted

LARGER_THAN_A_PAGE = b"x" * 5000


def test_a_full_folder_takes_nothing_until_it_has_room_again_and_keeps_what_it_got(tmp_path: Path) -> None:
    outer, inner = tmp_path / "job", tmp_path / "job" / "checkpoints"
    with mounted([inner, outer]):
        if not inner.is_mount():
            pytest.skip("only root can mount a file system")
        fill(inner)
        with pytest.raises(OSError, match="No space") as refused:
            (inner / "a").write_bytes(LARGER_THAN_A_PAGE)
        assert refused.value.errno == errno.ENOSPC
        (outer / "b").write_bytes(LARGER_THAN_A_PAGE)
        make_room(inner)
        (inner / "a").write_bytes(LARGER_THAN_A_PAGE)
    assert not outer.is_mount()
    assert [(outer / "b").read_bytes(), (inner / "a").read_bytes()] == [LARGER_THAN_A_PAGE] * 2
