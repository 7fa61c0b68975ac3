"""Flat ranges are boxes of the logical matrix. Boxes overlap where both contain the same elements."""

from __future__ import annotations

from tidegate.elastic.plan.parameters import Split, shard_of
from tidegate.elastic.plan.regions import Block, Overlap, blocks_of, first_clash, overlaps_of


def test_a_flat_range_of_a_row_parallel_shard_is_the_rest_of_a_row_whole_rows_and_the_beginning_of_one() -> None:
    shard = shard_of((4, 6), Split(1), tp=2, tp_rank=1)
    want = (Block(0, 5, 1, 1, 2, 3), Block(1, 3, 2, 3, 3, 3), Block(3, 3, 1, 2, 9, 3))
    assert blocks_of(shard, 2, 11) == want


def test_a_flat_range_within_a_row_is_one_box_and_an_empty_one_is_none() -> None:
    shard = shard_of((4, 6), Split(1), tp=2, tp_rank=1)
    assert blocks_of(shard, 4, 5) == (Block(1, 4, 1, 1, 4, 3),)
    assert blocks_of(shard, 4, 4) == ()


def test_a_flat_range_of_gate_and_up_has_a_box_in_each_half() -> None:
    shard = shard_of((8, 2), Split(0, stride=2), tp=2, tp_rank=1)
    assert blocks_of(shard, 3, 6) == (Block(0, 7, 1, 1, 3, 8), Block(0, 12, 1, 2, 4, 8))


def test_an_overlap_has_the_box_s_place_at_both_ends() -> None:
    source, target = Block(0, 2, 4, 4, 0, 4), Block(2, 0, 4, 3, 100, 3)
    assert overlaps_of([source], [target]) == (Overlap(2, 2, 2, 1, 8, 4, 102, 3),)


def test_boxes_side_by_side_do_not_overlap() -> None:
    assert overlaps_of([Block(0, 0, 2, 2, 0, 2)], [Block(0, 2, 2, 2, 0, 2), Block(2, 0, 2, 2, 0, 2)]) == ()
    assert first_clash([(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 4)]) is None


def test_a_clash_is_found_in_whatever_order_the_boxes_come() -> None:
    boxes = [(3, 1, 1, 1), (0, 0, 1, 9), (1, 0, 3, 2)]
    assert first_clash(boxes) == (3, 1)
    assert first_clash(boxes[::-1]) == (3, 1)
