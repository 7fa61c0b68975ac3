"""A portion is ready as soon as each data-parallel rank can get its share, and cuts no bundle."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.minibatches import MinibatchAssembly
from services.actor.portions import Portion, next_portion
from tidegate.candidates import Candidates
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.bundles import bundles_of
from tidegate.types import MinibatchOrder

GROUP = [5, 5]
TWO_GROUPS = BatchLimits(max_sequences=4)


def _assembly(num_prompts: int = 8, order: MinibatchOrder = MinibatchOrder.ARRIVAL) -> MinibatchAssembly:
    return MinibatchAssembly(Candidates(0, num_prompts), num_minibatches=1, order=order)


def _after(*prompts: int, streams: bool = True, filtered: tuple[int, ...] = (), dp: int = 2) -> Portion | None:
    assembly = _assembly()
    for prompt in prompts:
        assembly.add(prompt, has_spread=True)
    lengths = {prompt: GROUP for prompt in prompts if prompt not in filtered}
    return next_portion(assembly, lengths, TWO_GROUPS, dp=dp, streams=streams)


def test_a_portion_waits_until_each_rank_can_get_a_full_bundle() -> None:
    assert _after(0, 1, 2) is None
    assert _after(0, 1, 2, 3) == Portion((0, 1, 2, 3), (4, 4), is_last=False)
    assert _after(0, 1, dp=1) == Portion((0, 1), (4,), is_last=False)


def test_a_portion_leaves_each_rank_equally_many_bundles() -> None:
    assert _after(0, 1, 2, 3, 4, 5, 6) == Portion((0, 1, 2, 3), (4, 4), is_last=False)


def test_the_last_portion_has_all_that_are_left() -> None:
    assert _after(*range(8)) == Portion(tuple(range(8)), (4, 4, 4, 4), is_last=True)


@pytest.mark.parametrize(
    ("num_groups", "most_tokens", "dp", "taken", "is_last"),
    [
        (8, 80, 1, 8, True),
        (8, 79, 1, 6, False),
        (8, 79, 2, 4, False),
        (8, 1, 2, 4, False),
        (8, 1, 4, 8, True),
        (6, 1, 2, 4, False),
        (6, 1, 1, 2, False),
        (3, 1, 2, None, False),
    ],
)
def test_a_portion_is_cut_where_each_rank_still_has_a_bundle(
    num_groups: int, most_tokens: float, dp: int, taken: int | None, is_last: bool
) -> None:
    assembly = _assembly()
    for prompt in range(num_groups):
        assembly.add(prompt, has_spread=True)
    lengths = dict.fromkeys(range(num_groups), GROUP)
    portion = next_portion(assembly, lengths, TWO_GROUPS, dp=dp, streams=True, most_tokens=most_tokens)
    if taken is None:
        assert portion is None
    else:
        assert portion == Portion(tuple(range(taken)), (4,) * (taken // 2), is_last)


def test_without_streaming_a_minibatch_waits_for_all_its_groups() -> None:
    assert _after(0, 1, 2, 3, 4, 5, 6, streams=False) is None
    assert _after(*range(8), streams=False) is not None


def test_filtered_groups_fill_no_bundle_and_go_with_the_groups_before_them() -> None:
    assert _after(0, 1, 2, 3, filtered=(1,)) is None
    assert _after(0, 1, 2, 3, 4, filtered=(1,)) == Portion((0, 1, 2, 3, 4), (4, 4), is_last=False)
    assert _after(*range(8), filtered=tuple(range(8))) == Portion(tuple(range(8)), (), is_last=True)


SIZES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=8, max_size=8)


@pytest.mark.parametrize("order", MinibatchOrder)
@given(
    arrivals=st.permutations(range(8)),
    sizes=SIZES,
    filtered=st.sets(st.integers(0, 7)),
    dp=st.integers(1, 4),
    most_tokens=st.sampled_from([1.0, 100.0, math.inf]),
)
def test_every_group_is_in_one_portion_and_no_portion_cuts_a_bundle(
    order: MinibatchOrder, arrivals: list[int], sizes: list[list[int]], filtered: set[int], dp: int, most_tokens: float
) -> None:
    assembly, limits = _assembly(order=order), BatchLimits(max_sequences=4)
    portions: list[Portion] = []
    for prompt in arrivals:
        assembly.add(prompt, has_spread=True)
        lengths = {each: sizes[each] for each in range(8) if each not in filtered}
        while portion := next_portion(assembly, lengths, limits, dp=dp, streams=True, most_tokens=most_tokens):
            assembly.join(portion.prompts)
            portions.append(portion)
            if portion.is_last:
                assembly.close()
    taken = [prompt for portion in portions for prompt in portion.prompts]
    assert sorted(taken) == list(range(8))
    assert [portion.is_last for portion in portions] == [False] * (len(portions) - 1) + [True]
    assert all(len(portion.bundle_sizes) % dp == 0 for portion in portions[:-1])
    trained = [sizes[prompt] for prompt in taken if prompt not in filtered]
    whole, groups = bundles_of(trained, limits).sizes, iter(trained)
    want = [sum(len(next(groups)) for _ in range(size)) for size in whole]
    assert [size for portion in portions for size in portion.bundle_sizes] == want
