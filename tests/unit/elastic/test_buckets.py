"""Copies between two ranks travel in buckets of bounded memory, in one common order of all messages."""

from __future__ import annotations

import pytest

from tests.unit.elastic.message_simulation import carry_out
from tidegate.elastic.plan.buckets import Bucket, schedule
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Holding, Part, RegionCopy
from tidegate.elastic.plan.regions import Block


def copy_between(source: int, target: int, *, rows: int = 1, cols: int = 4, name: str = "p") -> RegionCopy:
    return RegionCopy(name, StateKind.WEIGHT, 4, source, target, 0, 0, rows, cols, 0, 10, 0, 5)


def part_of(*sends: RegionCopy) -> Part:
    held = {c.name: Holding(c.name, c.kind, 4, 100, (Block(0, 0, 10, 10, 0, 10),)) for c in sends}
    return Part(sends[0].source_rank, tuple(held.values()), (), (), sends, ())


def buckets_of(part: Part, memory_bytes: int) -> list[Bucket]:
    return [bucket for batch in schedule(part, ranks=range(8), memory_bytes=memory_bytes) for bucket in batch]


def test_copies_that_fit_share_a_bucket() -> None:
    part = part_of(copy_between(0, 1), copy_between(0, 1, name="q"))
    (bucket,) = buckets_of(part, 64)
    assert bucket.copies == part.sends
    assert bucket.size_bytes == 32


def test_a_copy_larger_than_a_bucket_is_cut_into_rows_and_then_within_a_row() -> None:
    buckets = buckets_of(part_of(copy_between(0, 1, rows=3, cols=4)), 2 * 28)
    want = [
        [(0, 0, 1, 4, 0, 0), (1, 0, 1, 3, 10, 5)],
        [(1, 3, 1, 1, 13, 8), (2, 0, 1, 4, 20, 10)],
    ]
    assert [
        [(c.row, c.col, c.rows, c.cols, c.source_offset, c.target_offset) for c in bucket.copies] for bucket in buckets
    ] == want
    buckets = buckets_of(part_of(copy_between(0, 1, rows=2, cols=4)), 2 * 12)
    boxes = [[(c.row, c.col, c.rows, c.cols) for c in bucket.copies] for bucket in buckets]
    assert boxes == [[(0, 0, 1, 3)], [(0, 3, 1, 1), (1, 0, 1, 2)], [(1, 2, 1, 2)]]


def test_wide_elements_come_before_narrow_ones_to_keep_both_aligned() -> None:
    narrow = copy_between(0, 1, cols=3, name="a")._replace(itemsize=2)
    wide = copy_between(0, 1, name="b")
    held = (
        Holding("a", StateKind.WEIGHT, 2, 100, (Block(0, 0, 10, 10, 0, 10),)),
        Holding("b", StateKind.WEIGHT, 4, 100, (Block(0, 0, 10, 10, 0, 10),)),
    )
    (bucket,) = buckets_of(Part(0, held, (), (), (narrow, wide), ()), 1000)
    assert bucket.copies == (wide, narrow)


def test_a_memory_too_small_for_one_element_is_refused() -> None:
    with pytest.raises(ValueError, match="a bucket of 3 bytes holds no element of p weight"):
        schedule(part_of(copy_between(0, 1)), ranks=range(2), memory_bytes=7)


def test_messages_within_a_host_come_first_and_then_earlier_rounds() -> None:
    part = part_of(copy_between(2, 1), copy_between(2, 0), copy_between(2, 3))
    hosts = {0: "a", 1: "b", 2: "b", 3: "a"}
    batches = schedule(part, ranks=range(4), memory_bytes=32, hosts=hosts)
    assert [bucket.target_rank for batch in batches for bucket in batch] == [1, 3, 0]


def test_batches_hold_as_many_buckets_as_fit_into_the_memory() -> None:
    part = part_of(*(copy_between(0, target) for target in range(1, 6)))
    batches = schedule(part, ranks=range(6), memory_bytes=32)
    assert [len(batch) for batch in batches] == [2, 2, 1]


def test_ranks_that_send_messages_in_different_orders_deadlock() -> None:
    """The common order prevents this. The test also shows that the simulation in the property test can fail."""
    one, other = Bucket(0, 1, 0, ()), Bucket(1, 0, 0, ())
    with pytest.raises(AssertionError, match="wait for each other"):
        carry_out({0: ((one,), (other,)), 1: ((other,), (one,))}, {}, {})
