"""The hand deals each sample to one copy at a time, splits the last groups, and isolates what was with a death."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference.hand import BATCHES_A_STAGE, Hand
from services.inference.shares import Share
from tests.unit.inference.deliveries import Delivered
from tests.watched_samples import generated_group
from tidegate.codec import decode_sample_id
from tidegate.megatron.batching import BatchLimits
from tidegate.types import SampleId
from tidegate.v1 import samples_pb2

LIMITS = BatchLimits(max_tokens=8)
"""Each sample is a micro-batch of its own: a group has two."""
WIDE = BatchLimits(max_tokens=1024)
"""A group is one micro-batch."""


def hand_of(*prompts: int, limits: BatchLimits = WIDE) -> Hand:
    hand = Hand(limits)
    for prompt in prompts:
        hand.add(Delivered(generated_group(prompt)))
    return hand


def prompts_of(batch: tuple[Share, ...]) -> list[int]:
    return [share.held.prompt for share in batch]


def draws_of(batch: tuple[Share, ...]) -> list[int]:
    return [sample.id.draw for share in batch for sample in share.group.samples]


def scored(share: Share) -> dict[SampleId, samples_pb2.Sample]:
    return {decode_sample_id(sample.id): sample for sample in share.group.samples}


def test_idle_copies_share_what_waits_and_no_batch_is_above_the_limit() -> None:
    hand = hand_of(*range(5))
    assert prompts_of(hand.deal(num_idle=2)) == [0, 1, 2]
    assert prompts_of(hand.deal(num_idle=1)) == [3, 4]
    assert hand.deal(num_idle=1) == ()
    assert len(hand_of(*range(50)).deal(num_idle=1)) == BATCHES_A_STAGE


def test_after_a_death_groups_are_dealt_alone_and_first() -> None:
    hand = hand_of(*range(4))
    batch = hand.deal(num_idle=2)
    hand.give_back(batch, died=True)
    assert [prompts_of(hand.deal(num_idle=1)) for _ in range(3)] == [[0], [1], [2, 3]]


def test_after_a_move_groups_are_dealt_first_and_together() -> None:
    hand = hand_of(*range(4))
    hand.give_back(hand.deal(num_idle=2), died=False)
    assert prompts_of(hand.deal(num_idle=1)) == [0, 1, 2, 3]


def test_a_batch_ends_before_a_group_that_is_to_be_alone() -> None:
    hand = hand_of(0)
    hand.give_back(hand.deal(num_idle=1), died=True)
    alone = hand.deal(num_idle=1)
    hand.add(Delivered(generated_group(1)))
    fresh = hand.deal(num_idle=1)
    hand.give_back(alone, died=True)
    hand.give_back(fresh, died=False)
    assert [prompts_of(hand.deal(num_idle=1)) for _ in range(2)] == [[1], [0]]


def test_a_group_delivered_again_is_dealt_once_and_keeps_its_last_delivery() -> None:
    hand = hand_of(0)
    (share,) = hand.deal(num_idle=1)
    again = Delivered(generated_group(0), num_deliveries=2)
    hand.add(again)
    assert hand.deal(num_idle=1) == ()
    assert share.held.delivery is again


def test_where_more_copies_than_groups_are_idle_a_group_is_split() -> None:
    hand = hand_of(0, limits=LIMITS)
    first, second = (hand.deal(num_idle=num_idle) for num_idle in (3, 2))
    assert hand.deal(num_idle=1) == ()
    assert (len(first), len(second)) == (1, 1)
    assert sorted(draws_of(first) + draws_of(second)) == [0, 1]
    assert not hand.note_scored(first[0], scored(first[0]))
    assert hand.note_scored(second[0], scored(second[0]))


def test_a_large_group_is_dealt_in_parts_so_that_a_copy_that_comes_gets_one() -> None:
    hand = Hand(LIMITS, num_stages=2)
    hand.add(Delivered(generated_group(0, rewards=[0.0] * 11)))
    hand.add(Delivered(generated_group(1)))
    parts = [hand.deal(num_idle=1) for _ in range(3)]
    assert [prompts_of(part) for part in parts] == [[0], [0, 1], []]
    assert [len(draws_of(part)) for part in parts] == [8, 5, 0]
    assert [hand.note_scored(share, scored(share)) for part in parts for share in part] == [False, True, True]


def test_a_group_of_one_micro_batch_is_never_split() -> None:
    hand = hand_of(0)
    assert draws_of(hand.deal(num_idle=5)) == [0, 1]


def test_a_share_of_a_group_that_is_settled_scores_nothing_and_waits_no_more() -> None:
    hand = hand_of(0, limits=LIMITS)
    first, second = (hand.deal(num_idle=num_idle) for num_idle in (2, 1))
    hand.give_back(first, died=True)
    hand.remove(first[0].held)
    assert hand.num_waiting == 0
    hand.note_scored(first[0], scored(first[0]))
    assert not hand.note_scored(second[0], scored(second[0]))
    hand.give_back(second, died=False)
    assert hand.num_waiting == 0


def test_a_group_that_was_with_a_dead_copy_is_split_no_further() -> None:
    hand = hand_of(0, limits=LIMITS)
    hand.give_back(hand.deal(num_idle=1), died=True)
    assert draws_of(hand.deal(num_idle=2)) == [0, 1]


@given(
    st.sampled_from([LIMITS, WIDE]),
    st.lists(st.tuples(st.sampled_from(["add", "deal", "die", "move", "score"]), st.integers(0, 5)), max_size=40),
)
def test_a_sample_waits_or_is_with_one_copy_or_is_scored(limits: BatchLimits, acts: list[tuple[str, int]]) -> None:
    hand, out, settled = Hand(limits), list[tuple[Share, ...]](), set[int]()
    for act, number in acts:
        if act == "add" and number not in settled:
            hand.add(Delivered(generated_group(number)))
        elif act == "deal":
            if batch := hand.deal(num_idle=number + 1):
                out.append(batch)
        elif out and act != "add":
            batch = out.pop(number % len(out))
            if act == "score":
                for share in batch:
                    if hand.note_scored(share, scored(share)):
                        hand.remove(share.held)
                        settled.add(share.held.prompt)
            else:
                hand.give_back(batch, died=act == "die")
        with_copies = [(share.held.prompt, index) for batch in out for share in batch for index in indices(share)]
        assert len(set(with_copies)) == len(with_copies)
        assert {prompt for prompt, _ in with_copies} <= hand.prompts
    # What waits comes out with the rest, and then all are scored.
    while batch := hand.deal(num_idle=2):
        out.append(batch)
    for batch in out:
        for share in batch:
            if hand.note_scored(share, scored(share)):
                hand.remove(share.held)
    assert not hand.prompts


def indices(share: Share) -> list[int]:
    return [index for batch in share.batches for index in batch]
