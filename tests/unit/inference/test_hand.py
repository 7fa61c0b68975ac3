"""The hand deals each group to one copy at a time, shares what waits, and isolates groups that were with a death."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.inference.hand import MAX_GROUPS_A_BATCH, Hand, HeldGroup
from tests.watched_samples import generated_group
from tidegate.v1 import samples_pb2


@dataclass(frozen=True)
class Delivered:
    """A delivery that is only held."""

    group: samples_pb2.SampleGroup
    num_deliveries: int = 1

    async def ack(self) -> None:
        raise AssertionError("the hand settles nothing")

    async def in_progress(self) -> None:
        raise AssertionError("the hand settles nothing")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        raise AssertionError("the hand settles nothing")

    async def dead_letter(self, reason: str) -> None:
        raise AssertionError("the hand settles nothing")


def hand_of(*prompts: int) -> Hand:
    hand = Hand()
    for prompt in prompts:
        hand.add(Delivered(generated_group(prompt)))
    return hand


def prompts_of(batch: tuple[HeldGroup, ...]) -> list[int]:
    return [held.prompt for held in batch]


def test_idle_copies_share_what_waits_and_no_batch_is_above_the_limit() -> None:
    hand = hand_of(*range(5))
    assert prompts_of(hand.deal(num_idle=2)) == [0, 1, 2]
    assert prompts_of(hand.deal(num_idle=1)) == [3, 4]
    assert hand.deal(num_idle=1) == ()
    assert len(hand_of(*range(50)).deal(num_idle=1)) == MAX_GROUPS_A_BATCH


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
    (held,) = hand.deal(num_idle=1)
    again = Delivered(generated_group(0), num_deliveries=2)
    hand.add(again)
    assert hand.deal(num_idle=1) == ()
    assert held.delivery is again


@given(st.lists(st.tuples(st.sampled_from(["add", "deal", "die", "move", "settle"]), st.integers(0, 5)), max_size=40))
def test_a_group_waits_or_is_with_one_copy(acts: list[tuple[str, int]]) -> None:
    hand, out = Hand(), list[tuple[HeldGroup, ...]]()
    for act, number in acts:
        if act == "add":
            hand.add(Delivered(generated_group(number)))
        elif act == "deal":
            if batch := hand.deal(num_idle=number + 1):
                out.append(batch)
        elif out:
            batch = out.pop(number % len(out))
            if act == "settle":
                for held in batch:
                    hand.remove(held)
            else:
                hand.give_back(batch, died=act == "die")
        with_copies = [held.prompt for batch in out for held in batch]
        assert len(with_copies) + hand.num_waiting == len(hand.prompts)
        assert len(set(with_copies)) == len(with_copies)
        assert set(with_copies) <= hand.prompts
