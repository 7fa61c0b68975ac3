"""A plan that would lose, double or misplace elements cannot be made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Holding, Part, Plan, PlanInvalid, RegionCopy
from tidegate.elastic.plan.regions import Block

W = StateKind.WEIGHT
# Rank 0 holds a vector of 8 elements, rank 1 holds nothing. Both need 4 of them, rank 0 the first ones.
HELD = Holding("p", W, 2, 8, (Block(0, 0, 1, 8, 0, 8),))
FIRST = Holding("p", W, 2, 4, (Block(0, 0, 1, 4, 0, 4),))
LAST = Holding("p", W, 2, 4, (Block(0, 4, 1, 4, 0, 4),))
LOCAL = RegionCopy("p", W, 2, 0, 0, 0, 0, 1, 4, 0, 8, 0, 4)
FAR = RegionCopy("p", W, 2, 0, 1, 0, 4, 1, 4, 4, 8, 0, 4)
SENDER = Part(0, (HELD,), (FIRST,), (LOCAL,), (FAR,), ())
RECEIVER = Part(1, (), (LAST,), (), (), (FAR,))


def half(copy: RegionCopy, index: int) -> RegionCopy:
    by = 2 * index
    return copy._replace(
        col=copy.col + by,
        cols=2,
        source_offset=copy.source_offset + by,
        target_offset=copy.target_offset + by,
    )


def test_a_plan_counts_its_bytes_and_finds_the_part_of_a_rank() -> None:
    plan = Plan((SENDER, RECEIVER))
    assert plan.received_bytes == SENDER.sent_bytes == RECEIVER.received_bytes == 8
    assert plan.part(1) is RECEIVER
    with pytest.raises(ValueError, match="rank 2 is in no layout of this plan"):
        plan.part(2)


def receiver(*copies: RegionCopy) -> Part:
    return Part(1, (), (LAST,), (), (), copies)


def sender(*copies: RegionCopy) -> Part:
    return Part(0, (HELD,), (), (), copies, ())


INVALID: dict[str, tuple[Callable[[], object], str]] = {
    "nothing arrives": (lambda: receiver(), "needs 4 elements of p weight and gets 0"),
    "a half arrives": (lambda: receiver(half(FAR, 1)), "needs 4 elements of p weight and gets 2"),
    "all arrives twice": (lambda: receiver(FAR, FAR), "gets 8, row 0 column 4 twice"),
    "one half arrives twice": (lambda: receiver(half(FAR, 0), half(FAR, 0)), "gets 4, row 0 column 4 twice"),
    "an unneeded tensor arrives": (lambda: receiver(FAR, FAR._replace(name="q")), "needs no 1 x 4 elements of q"),
    "it arrives at another place": (lambda: receiver(FAR._replace(target_offset=1)), "at offset 1"),
    "it leaves from another place": (lambda: sender(FAR._replace(source_offset=3)), "holds no .* at offset 3"),
    "another stride": (lambda: sender(FAR._replace(source_stride=4)), "holds no .* stride 4"),
    "more leaves than is held": (lambda: sender(FAR._replace(cols=5)), "holds no 1 x 5 elements"),
    "another size of elements": (lambda: sender(FAR._replace(itemsize=4)), "4 bytes each"),
    "a tensor that is not held": (lambda: sender(FAR._replace(kind=StateKind.EXP_AVG)), "of p exp_avg"),
    "a send to itself": (lambda: sender(LOCAL), "send of rank 0 goes from rank 0 to rank 0"),
    "somebody else's send": (lambda: sender(FAR._replace(source_rank=2)), "from rank 2 to rank 1"),
    "somebody else's receive": (lambda: receiver(FAR._replace(target_rank=2)), "receive of rank 1 .* to rank 2"),
    "a local copy that leaves": (lambda: Part(0, (HELD,), (), (FAR,), (), ()), "local copy of rank 0"),
    "a receive that nobody sends": (
        lambda: Plan((Part(0, (HELD,), (FIRST,), (LOCAL,), (), ()), RECEIVER)),
        "sent 0 and received 1 times from rank 0 to rank 1",
    ),
    "two parts of one rank": (lambda: Plan((RECEIVER, RECEIVER)), "one part per rank"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_plan_is_refused_when_made(name: str) -> None:
    make, want = INVALID[name]
    with pytest.raises(PlanInvalid, match=want):
        make()
