"""The order of prompts: by hints when an iteration opens, or by what the first responses show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.policy.situation import Situation
from services.scheduler.policy.tide.prompt_order import orders_at_opening, probing_order, queue_in
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.observed import ENDED, QUEUED
from services.scheduler.state.remembered import Remembered, as_configured
from tests.unit.scheduler.situations import after, generation, job, seen
from tidegate.types import MinibatchOrder

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)
HINTS = tuple(100.0 + 7 * prompt % 24 for prompt in range(24))


def opened(order: MinibatchOrder) -> tuple[tuple[int, ...], ...]:
    spec = replace(SPEC, minibatch_order=order)
    situation = seen(spec, as_configured(spec), num_unfinished=48, num_unsubmitted=48)
    situation = replace(situation, generation=replace(situation.generation, hints=HINTS))
    return orders_at_opening(situation, short_share=0.25, shorts_a_long=1)


@pytest.mark.parametrize("order", MinibatchOrder)
def test_an_order_has_every_prompt_once(order: MinibatchOrder) -> None:
    for each in opened(order):
        assert sorted(each) == list(range(24))


def test_prompts_of_fixed_minibatches_come_in_the_order_of_these_or_the_longest_first() -> None:
    by_minibatch, longest = opened(MinibatchOrder.FIXED)
    assert [group // 8 for group in by_minibatch] == sorted(group // 8 for group in by_minibatch)
    for minibatch in range(3):
        hints = [HINTS[group] for group in by_minibatch if group // 8 == minibatch]
        assert hints == sorted(hints, reverse=True)
    assert [HINTS[group] for group in longest] == sorted(HINTS, reverse=True)


PROBED = tuple(range(6, 24))
"""The prompts behind the first quarter."""


def probed(*, order: MinibatchOrder = MinibatchOrder.ARRIVAL, group_size: int = 4, is_begun: bool = True) -> Situation:
    """An iteration without hints. `is_begun`: the first response of each probed prompt has ended, of the higher ones
    with more tokens, and the others wait."""
    spec = job(actor=2, rollout=4, inference=2, prompts=24, group_size=group_size, minibatches=3)
    spec = replace(spec, minibatch_order=order)
    ended = [is_begun and draw == 0 and prompt in PROBED for prompt in range(24) for draw in range(group_size)]
    lengths = tuple(100 + 20 * (index // group_size) if has_ended else 0 for index, has_ended in enumerate(ended))
    places = tuple(ENDED if has_ended else QUEUED for has_ended in ended)
    engines = as_configured(spec).engines
    return seen(
        spec,
        as_configured(spec),
        picture=generation(spec, engines, lengths=lengths, places=places),
        remembered=Remembered(),
    )


def probing(situation: Situation) -> tuple[int, ...]:
    return probing_order(situation, short_share=0.25, shorts_a_long=1)


def test_an_order_has_every_prompt_and_a_probed_one_twice() -> None:
    order = probing(probed(is_begun=False))
    assert sorted(order) == sorted([*range(24), *PROBED])
    assert order[:24] == tuple(range(24))
    waiting = queue_in(probed(is_begun=False), order)
    assert [divmod(int(each), 4) for each in waiting[:24]] == [
        (prompt, draw) for prompt in range(6) for draw in range(4)
    ]
    assert [divmod(int(each), 4) for each in waiting[24:42]] == [(prompt, 0) for prompt in PROBED]


def test_prompts_whose_probes_are_long_come_first_with_the_shortest_between_them() -> None:
    others = probing(probed())[24:]
    short = {6, 7, 8, 9}
    assert [prompt for prompt in others if prompt not in short] == list(range(23, 9, -1))
    assert set(others[:8]) > short


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(probed(order=MinibatchOrder.FIXED), id="a fixed order"),
        pytest.param(probed(group_size=1), id="one response a prompt"),
        pytest.param(
            replace(probed(), generation=replace(probed().generation, hints=HINTS)), id="hints that tell prompts apart"
        ),
        pytest.param(seen(SPEC, as_configured(SPEC), num_unfinished=20), id="no response waits"),
    ],
)
def test_nothing_is_probed_where_it_would_tell_nothing_new(situation: Situation) -> None:
    assert probing(situation) == ()


def test_the_order_is_made_anew_as_responses_end_and_stays_in_between() -> None:
    policy = TidePolicy()
    opened = policy.choose(probed(is_begun=False))
    assert opened.group_order == probing(probed(is_begun=False))
    later = replace(probed(), now_ms=60_000, remembered=after(opened))
    again = policy.choose(later)
    assert again.group_order == probing(later) != opened.group_order
    soon = replace(later, now_ms=60_400, remembered=after(again))
    assert policy.choose(soon).group_order == ()
