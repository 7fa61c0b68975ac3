"""The hand deals each sample to one copy at a time, splits the last groups, and isolates what was with a death."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference.hand import BATCHES_A_STAGE, Hand
from services.inference.shares import Share
from tests.unit.inference.deliveries import Delivered
from tests.watched_samples import ended_response, generated_group
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


def add_ahead(hand: Hand, *responses: tuple[int, int]) -> None:
    for prompt, draw in responses:
        hand.add_ahead(ended_response(prompt, draw))


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
    hand.remove(0)
    assert hand.num_waiting == 0
    hand.note_scored(first[0], scored(first[0]))
    assert not hand.note_scored(second[0], scored(second[0]))
    hand.give_back(second, died=False)
    assert hand.num_waiting == 0


def test_a_group_that_was_with_a_dead_copy_is_split_no_further() -> None:
    hand = hand_of(0, limits=LIMITS)
    hand.give_back(hand.deal(num_idle=1), died=True)
    assert draws_of(hand.deal(num_idle=2)) == [0, 1]


def test_delivered_groups_come_first_and_then_the_oldest_prompts_ahead() -> None:
    hand = hand_of(3)
    add_ahead(hand, (2, 0), (1, 0), (2, 1))
    assert hand.deal_ahead(num_idle=1) == ()
    assert prompts_of(hand.deal(num_idle=1)) == [3]
    assert hand.deal(num_idle=1) == ()
    batch = hand.deal_ahead(num_idle=1)
    assert prompts_of(batch) == [2, 1]
    assert [len(share.batches) for share in batch] == [1, 1], "the responses of a prompt share a micro-batch"
    assert draws_of(batch) == [1, 0, 0]
    assert hand.deal_ahead(num_idle=1) == ()


def test_responses_ahead_are_shared_evenly_and_no_batch_is_above_the_limit() -> None:
    hand = hand_of()
    add_ahead(hand, *((prompt, 0) for prompt in range(5)))
    assert prompts_of(hand.deal_ahead(num_idle=2)) == [0, 1, 2]
    assert prompts_of(hand.deal_ahead(num_idle=1)) == [3, 4]
    hand = hand_of(limits=LIMITS)
    add_ahead(hand, *((0, draw) for draw in range(3 * BATCHES_A_STAGE)))
    assert [len(draws_of(hand.deal_ahead(num_idle=num_idle))) for num_idle in (6, 1, 1, 1)] == [2, 4, 4, 2]


def test_only_the_rest_of_a_group_is_dealt_when_it_is_delivered() -> None:
    hand = hand_of()
    hand.add_ahead(ended_response(0, 0))
    (done,) = hand.deal_ahead(num_idle=1)
    assert not hand.note_scored(done, scored(done))
    hand.add_ahead(ended_response(0, 1))
    (under_way,) = hand.deal_ahead(num_idle=1)
    hand.add_ahead(ended_response(0, 2))
    assert 0 not in hand
    assert hand.deliveries == []
    assert hand.num_tokens_ahead == 1
    assert hand.add(Delivered(generated_group(0, rewards=[0.0] * 4))) is None
    assert 0 in hand
    assert hand.deal_ahead(num_idle=1) == ()
    (rest,) = hand.deal(num_idle=1)
    assert sorted(draws_of((rest,))) == [2, 3]
    assert not hand.note_scored(rest, scored(rest))
    assert hand.note_scored(under_way, scored(under_way))
    assert hand.num_tokens_ahead == 1 + 2, "the rest was not scored ahead"


def test_a_group_that_was_scored_ahead_whole_is_returned_with_its_first_delivery_only() -> None:
    hand = hand_of()
    add_ahead(hand, (0, 0), (0, 1))
    (share,) = hand.deal_ahead(num_idle=1)
    assert not hand.note_scored(share, scored(share))
    held = hand.add(Delivered(generated_group(0)))
    assert held is share.held
    assert hand.add(Delivered(generated_group(0), num_deliveries=2)) is None
    assert hand.deal(num_idle=1) == ()


def test_a_response_with_other_tokens_than_its_groups_is_scored_again() -> None:
    hand = hand_of()
    for draw in (0, 1, 2):
        hand.add_ahead(ended_response(0, draw, tokens=[9] * (draw + 1)))
        if draw < 2:
            (share,) = hand.deal_ahead(num_idle=1)
            if draw == 0:
                hand.note_scored(share, scored(share))
    assert hand.add(Delivered(generated_group(0, rewards=[0.0] * 3))) is None
    (again,) = hand.deal(num_idle=1)
    assert sorted(draws_of((again,))) == [0, 1, 2]
    assert not hand.note_scored(share, scored(share)), "what was under way had other tokens"
    assert hand.note_scored(again, scored(again))
    assert all(list(each.sample.response_tokens) == [3] * each.num_tokens for each in again.responses)


def test_a_response_told_twice_waits_once_with_the_last_tokens() -> None:
    hand = hand_of()
    hand.add_ahead(ended_response(0, 1, tokens=[9, 9]))
    hand.add_ahead(ended_response(0, 1))
    hand.add_ahead(ended_response(0, 1))
    (share,) = hand.deal_ahead(num_idle=1)
    assert [list(each.sample.response_tokens) for each in share.responses] == [[3, 3]]
    hand.add_ahead(ended_response(0, 1))
    assert hand.deal_ahead(num_idle=1) == ()


def test_a_death_gives_responses_ahead_back_and_counts_for_their_group() -> None:
    hand = hand_of()
    add_ahead(hand, (0, 0), (1, 0))
    hand.give_back(hand.deal_ahead(num_idle=1), died=True)
    add_ahead(hand, (2, 0), (1, 1))
    assert [prompts_of(hand.deal_ahead(num_idle=1)) for _ in range(2)] == [[0], [1]], "alone and first"
    assert prompts_of(hand.deal_ahead(num_idle=1)) == [2]
    hand = hand_of()
    add_ahead(hand, (0, 0), (1, 0))
    batch = hand.deal_ahead(num_idle=1)
    hand.add(Delivered(generated_group(1)))
    hand.give_back(batch, died=True)
    assert [draws_of(hand.deal(num_idle=1)) for _ in range(3)] == [[0], [1], []], "the delivered one waits with groups"
    assert prompts_of(hand.deal_ahead(num_idle=1)) == [0]


def test_a_group_that_waits_for_its_delivery_is_dealt_then_alone_and_whole() -> None:
    hand = hand_of()
    add_ahead(hand, (0, 0))
    (share,) = batch = hand.deal_ahead(num_idle=1)
    hand.give_back(batch, died=True)
    hand.keep_for_delivery(share.held)
    add_ahead(hand, (0, 1))
    assert hand.deal_ahead(num_idle=1) == ()
    hand.add(Delivered(generated_group(0)))
    hand.add(Delivered(generated_group(1)))
    assert [prompts_of(hand.deal(num_idle=1)) for _ in range(2)] == [[0], [1]]
    assert sorted(each.id.draw for each in share.held.responses.values()) == [0, 1]


def test_what_was_held_ahead_of_a_settled_group_is_forgotten() -> None:
    hand = hand_of()
    add_ahead(hand, (0, 0), (1, 0), (1, 1))
    (first, *_) = hand.deal_ahead(num_idle=2)
    hand.remove(0)
    hand.remove(1)
    assert not hand.note_scored(first, scored(first))
    hand.give_back([first], died=True)
    assert hand.deal_ahead(num_idle=1) == ()
    assert not hand.prompts


@given(
    st.sampled_from([LIMITS, WIDE]),
    st.lists(
        st.tuples(st.sampled_from(["tell", "add", "deal", "ahead", "die", "move", "score"]), st.integers(0, 5)),
        max_size=40,
    ),
)
def test_a_sample_waits_or_is_with_one_copy_or_is_scored(limits: BatchLimits, acts: list[tuple[str, int]]) -> None:
    hand, out, settled = Hand(limits), list[tuple[Share, ...]](), set[int]()
    for act, number in acts:
        if act == "add" and number not in settled:
            hand.add(Delivered(generated_group(number)))
        elif act == "tell" and number not in settled:
            hand.add_ahead(ended_response(number, len(acts) % 2))
        elif act in ("deal", "ahead"):
            deal = hand.deal if act == "deal" else hand.deal_ahead
            if batch := deal(num_idle=number + 1):
                out.append(batch)
        elif out and act not in ("tell", "add"):
            batch = out.pop(number % len(out))
            if act == "score":
                for share in batch:
                    if hand.note_scored(share, scored(share)):
                        hand.remove(share.held.prompt)
                        settled.add(share.held.prompt)
            else:
                hand.give_back(batch, died=act == "die")
        with_copies = [(share.held.prompt, index) for batch in out for share in batch for index in draws_of((share,))]
        assert len(set(with_copies)) == len(with_copies)
        assert {prompt for prompt, _ in with_copies} <= hand.prompts
    # What waits comes out with the rest, and then all are scored.
    for prompt in hand.prompts:
        if prompt not in hand and hand.add(Delivered(generated_group(prompt))) is not None:
            hand.remove(prompt)
    while batch := hand.deal(num_idle=2):
        out.append(batch)
    for batch in out:
        for share in batch:
            if hand.note_scored(share, scored(share)):
                hand.remove(share.held.prompt)
    assert not hand.prompts
