"""The names of arena files, and which of them a sweep removes."""

from __future__ import annotations

from pathlib import Path

from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.state.arena_files import arena_path, sweep
from tidegate.types import Layout

MESHES = (Mesh(Layout(), (1,), even_chunks(2, pp=1)), Mesh(Layout(dp=2), (1, 2), even_chunks(2, pp=1)))


def test_every_arena_has_its_own_name(tmp_path: Path) -> None:
    paths = [
        arena_path(tmp_path, epoch, member, number, mesh)
        for epoch in (1, 2)
        for member in (1, 12)
        for number in (1, 2)
        for mesh in MESHES
    ]

    assert len(set(paths)) == len(paths)


def test_a_sweep_removes_only_earlier_epochs(tmp_path: Path) -> None:
    old, new = (arena_path(tmp_path, epoch, 1, 1, MESHES[0]) for epoch in (9, 10))
    other = tmp_path / "epoch9-of-another-program"
    for path in (old, new, other):
        path.touch()

    sweep(tmp_path, epoch=10)
    sweep(tmp_path, epoch=10)

    assert sorted(tmp_path.iterdir()) == sorted([new, other])
