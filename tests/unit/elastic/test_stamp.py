"""A record says which update its tensors belong to, with that update's note, or that they belong to none."""

from __future__ import annotations

import pytest
import torch

from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.stamp import RECORD_BYTES, Note, Stamp


def note(num_updates: int, **cursor: str) -> Note:
    return Note(Progress(num_updates, 16 * num_updates, cursor), ({"lr": 0.5, "betas": [0.9, 0.999]},))


@pytest.fixture
def stamp() -> Stamp:
    return Stamp(torch.zeros(RECORD_BYTES, dtype=torch.uint8))


def test_memory_that_was_never_written_belongs_to_no_update(stamp: Stamp) -> None:
    assert stamp.read() is None


def test_a_copy_of_a_record_s_bytes_has_its_note(stamp: Stamp) -> None:
    stamp.set(note(3))

    assert Stamp(stamp.record.clone()).read() == note(3)


def test_an_update_counts_once_it_is_applied_and_not_before(stamp: Stamp) -> None:
    stamp.set(note(3))

    with stamp.applying(lambda: note(4)):
        assert stamp.read() is None
    assert stamp.read() == note(4)


def test_an_update_that_fails_while_it_is_applied_leaves_no_update(stamp: Stamp) -> None:
    stamp.set(note(3))

    with pytest.raises(RuntimeError), stamp.applying(lambda: note(4)):
        raise RuntimeError("a peer is dead")
    assert stamp.read() is None


def test_tensors_that_are_being_overwritten_belong_to_no_update(stamp: Stamp) -> None:
    stamp.set(note(3))

    with stamp.writing(note(9)):
        assert stamp.read() is None
    assert stamp.read() == note(9)


def test_a_note_may_change_without_an_update(stamp: Stamp) -> None:
    stamp.set(note(3))

    stamp.renote(note(3, shard="b"))

    assert stamp.read() == note(3, shard="b")


def test_a_note_too_long_for_its_record_is_refused_and_the_last_one_stays(stamp: Stamp) -> None:
    stamp.set(note(3))

    with pytest.raises(ValueError, match="room for 32760: keep a shorter cursor"):
        stamp.renote(note(3, shard="b" * 40_000))
    assert stamp.read() == note(3)
