"""Spans are contiguous and add up to the whole time exactly, whatever the slot does."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tidegate.runtime.slot_clock import SlotClock, SlotSpan, waiting_for

STATES = ["training", "generating", waiting_for("prompts")]


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["enter", "during", "take"]), st.sampled_from(STATES)))
)
def test_spans_cover_the_time_without_a_gap(steps: list[tuple[int, str, str]]) -> None:
    hands = Hands()
    clock = SlotClock(hands)
    spans: list[SlotSpan] = []
    for passed_ns, step, state in steps:
        hands.now_ns += passed_ns
        if step == "enter":
            clock.enter(state)
        elif step == "during":
            before = clock.state
            with clock.during(state):
                hands.now_ns += 1
            assert clock.state == before
        else:
            spans += clock.take()
    spans += clock.take()
    assert sum(span.end_ns - span.start_ns for span in spans) == hands.now_ns - 1_000
    assert all(span.end_ns > span.start_ns for span in spans)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(spans))
    assert not spans or spans[0].start_ns == 1_000


def test_a_span_has_the_work_that_it_was_entered_with_and_the_tokens_that_ended_with_it() -> None:
    hands = Hands()
    clock = SlotClock(hands)
    with clock.during("training", {"iteration": 2, "tokens": 40}):
        hands.now_ns += 10
    clock.enter("generating", {"iteration": 3})
    hands.now_ns += 10
    assert clock.take(num_tokens=7) == [
        SlotSpan("training", 1_000, 1_010, (("iteration", 2), ("tokens", 40))),
        SlotSpan("generating", 1_010, 1_020, (("iteration", 3), ("tokens", 7))),
    ]
    hands.now_ns += 10
    assert clock.take() == [SlotSpan("generating", 1_020, 1_030, (("iteration", 3),))]


def test_a_state_entered_again_stays_one_span() -> None:
    hands = Hands()
    clock = SlotClock(hands)
    for _ in range(3):
        hands.now_ns += 10
        clock.enter("starting")
    assert clock.take() == [SlotSpan("starting", 1_000, 1_030)]


def test_counts_are_in_the_span_in_which_they_were_made() -> None:
    hands = Hands()
    clock = SlotClock(hands)
    clock.enter("generating", {"iteration": 3})
    clock.count({"steps": 1})
    hands.now_ns += 10
    clock.count({"steps": 2, "late": 1})
    assert clock.take(num_tokens=7) == [
        SlotSpan("generating", 1_000, 1_010, (("iteration", 3), ("tokens", 7), ("steps", 3), ("late", 1)))
    ]
    clock.count({"steps": 1})
    assert clock.take() == [], "no time has passed: the count waits for the next span"
    hands.now_ns += 10
    assert clock.take() == [SlotSpan("generating", 1_010, 1_020, (("iteration", 3), ("steps", 1)))]
