"""Candidates: only the spread of the groups decides which prompts an iteration takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.candidates import Candidates, has_spread

FIRST = 10


def taken(spread: Sequence[bool], order: Sequence[int], *, num_prompts: int, max_extra_prompts: int) -> Candidates:
    """The candidates after all groups came in. The first known candidate in `order` comes next."""
    candidates = Candidates(FIRST, num_prompts, max_extra_prompts)
    while not candidates.is_complete:
        prompt = min(set(candidates.prompts) - set(candidates.seen), key=lambda each: order[each - FIRST])
        candidates.add(prompt, has_spread=spread[prompt - FIRST])
    return candidates


def test_rewards_that_are_all_equal_have_no_spread() -> None:
    assert not has_spread([0.5, 0.5, 0.5])
    assert not has_spread([1.0])
    assert has_spread([0.0, 0.0, 1.0])


def test_a_group_without_spread_is_replaced_by_the_next_prompt_as_long_as_there_is_one() -> None:
    candidates = Candidates(FIRST, 2, 2)
    assert (candidates.prompts, candidates.possible) == (range(10, 12), range(10, 14))
    candidates.add(11, has_spread=False)
    assert candidates.prompts == range(10, 13)
    candidates.add(10, has_spread=True)
    candidates.add(12, has_spread=False)
    assert (candidates.prompts, candidates.is_complete) == (range(10, 14), False)
    candidates.add(13, has_spread=False)
    assert (candidates.prompts, candidates.is_complete) == (range(10, 14), True)
    assert [prompt for prompt in candidates.seen if candidates.counts(prompt)] == [10]


def test_without_extra_prompts_every_group_counts() -> None:
    candidates = Candidates(FIRST, 2)
    for prompt in (11, 10):
        candidates.add(prompt, has_spread=False)
    assert (candidates.prompts, candidates.is_complete) == (range(10, 12), True)
    assert all(map(candidates.counts, candidates.seen))


@given(
    spread=st.lists(st.booleans(), min_size=12, max_size=12),
    order=st.permutations(range(12)),
    num_prompts=st.integers(1, 6),
    max_extra_prompts=st.integers(1, 6),
)
def test_the_candidates_are_the_shortest_run_that_holds_enough_groups_with_spread_whenever_they_come(
    spread: list[bool], order: list[int], num_prompts: int, max_extra_prompts: int
) -> None:
    candidates = taken(spread, order, num_prompts=num_prompts, max_extra_prompts=max_extra_prompts)
    enough = (length for length in range(13) if sum(spread[:length]) == num_prompts)
    want = min(next(enough, 12), num_prompts + max_extra_prompts)
    assert candidates.prompts == range(FIRST, FIRST + want)
    assert sorted(candidates.seen) == list(candidates.prompts), "nothing is sampled that is not needed"


@pytest.mark.parametrize(("prompt", "want"), [(9, "prompt 9 is not"), (14, r"\(10-13\)"), (10, "added before")])
def test_a_prompt_of_another_iteration_or_a_second_time_is_refused(prompt: int, want: str) -> None:
    candidates = Candidates(FIRST, 2, 2)
    candidates.add(10, has_spread=True)
    with pytest.raises(ValueError, match=want):
        candidates.add(prompt, has_spread=True)
