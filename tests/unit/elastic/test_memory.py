"""Arenas: which memory stays after a release, and what another process of the host sees."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from tidegate.elastic.model.memory import ALIGNMENT_BYTES, Arena, ArenaFull, ArenaReader, OwnArena, SharedArena

MakeArena = Callable[[], Arena]


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as folder:
        yield Path(folder)


@pytest.fixture
def shared(tmpfs: Path) -> Iterator[SharedArena]:
    arena = SharedArena(tmpfs / "arena")
    yield arena
    arena.close()


@pytest.fixture(params=["own", "shared"])
def arena(request: pytest.FixtureRequest) -> Arena:
    if request.param == "own":
        return OwnArena(torch.device("cpu"))
    made: SharedArena = request.getfixturevalue("shared")
    return made


def test_tensors_and_views_survive_a_release_and_are_zero_after_it(arena: Arena) -> None:
    odd, large = arena.empty(3, torch.bfloat16), arena.empty(100_000, torch.float32)
    view = large[10:70].view(6, 10)
    odd.fill_(1)
    large.fill_(2)
    address = large.data_ptr()
    arena.release()
    arena.release()
    arena.materialise()
    assert not odd.any()
    assert not large.any()
    large[15] = 5
    assert view[0, 5] == 5
    assert isinstance(arena, OwnArena) or large.data_ptr() == address
    assert arena.num_bytes >= odd.nbytes + large.nbytes


def test_a_materialise_without_a_release_keeps_the_content(arena: Arena) -> None:
    tensor = arena.empty(10, torch.float32).fill_(7)
    arena.materialise()
    assert tensor.eq(7).all()


def test_every_tensor_is_aligned_and_none_overlap(arena: Arena) -> None:
    tensors = [arena.empty(size, torch.int8) for size in (1, 63, 64, 65, 0, 4097)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors if tensor.numel())
    assert [set(tensor.tolist()) for tensor in tensors] == [{0}, {1}, {2}, {3}, set(), {5}]


def test_a_released_storage_is_empty_and_a_released_file_has_no_pages(shared: SharedArena) -> None:
    own = OwnArena(torch.device("cpu"))
    tensor = own.empty(1000, torch.float32)
    own.release()
    assert tensor.untyped_storage().nbytes() == 0
    shared.empty(1 << 20, torch.uint8).fill_(1)
    shared.release()
    assert shared.path.stat().st_blocks == 0


def test_pages_are_taken_before_they_are_touched(shared: SharedArena) -> None:
    shared.empty(1 << 20, torch.uint8)
    assert shared.path.stat().st_blocks * 512 >= 1 << 20
    shared.release()
    shared.materialise()
    assert shared.path.stat().st_blocks * 512 >= 1 << 20


def test_a_tensor_that_does_not_fit_is_refused_with_numbers_and_leaves_the_arena_unchanged(shared: SharedArena) -> None:
    tensor = shared.empty(4, torch.float32).fill_(3)
    space = os.statvfs(shared.path.parent)
    size_bytes = space.f_blocks * space.f_frsize + 4096
    with pytest.raises(ArenaFull, match=rf"an arena there needs {size_bytes} more.*--shm-size"):
        shared.empty(size_bytes, torch.uint8)
    assert shared.num_bytes == ALIGNMENT_BYTES
    assert tensor.eq(3).all()


def test_an_arena_never_takes_an_existing_file(shared: SharedArena) -> None:
    with pytest.raises(FileExistsError):
        SharedArena(shared.path)


def test_a_file_outlives_its_process_and_is_read_bit_for_bit(tmpfs: Path) -> None:
    path = tmpfs / "arena"
    child = multiprocessing.get_context("fork").Process(target=_fill_and_die, args=(path,))
    child.start()
    child.join(timeout=30)
    mine = SharedArena(tmpfs / "other")
    place = mine.place(mine.empty(5, torch.bfloat16))
    found = ArenaReader().array_at(place._replace(path=str(path)))
    want = torch.arange(5, dtype=torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(found, want)
    mine.close()


def _fill_and_die(path: Path) -> None:
    SharedArena(path).empty(5, torch.bfloat16).copy_(torch.arange(5))
    os.kill(os.getpid(), 9)


def test_a_reader_sees_writes_and_cannot_write(shared: SharedArena) -> None:
    tensor, reader = shared.empty(8, torch.float32), ArenaReader()
    array = reader.array_at(shared.place(tensor[2:4]))
    tensor[2] = 1.5
    assert array.view(np.float32)[0] == 1.5
    assert not array.flags.writeable


def test_a_reader_notices_that_a_file_was_replaced(tmpfs: Path) -> None:
    reader = ArenaReader()
    values = []
    for value in (1, 2):
        arena = SharedArena(tmpfs / "arena")
        place = arena.place(arena.empty(1, torch.int32).fill_(value))
        values.append(int(reader.array_at(place)[0]))
        arena.unlink()
        arena.close()
    assert values == [1, 2]
    with pytest.raises(FileNotFoundError):
        reader.bytes_at(str(tmpfs / "arena"))


def test_a_reader_unmaps_files_that_lost_their_name_when_it_maps_another(tmpfs: Path) -> None:
    reader = ArenaReader()
    for number in range(3):
        arena = SharedArena(tmpfs / f"arena{number}")
        reader.array_at(arena.place(arena.empty(1, torch.int32)))
        arena.unlink()
        arena.close()
        del arena
    assert len(re.findall(rf"{tmpfs}/arena\d", Path("/proc/self/maps").read_text())) == 1
