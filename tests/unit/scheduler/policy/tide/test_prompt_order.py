"""The order of prompts with which an iteration opens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.policy.tide.prompt_order import order_at_opening
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import job, seen
from tidegate.types import MinibatchOrder

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)
HINTS = tuple(100.0 + 7 * prompt % 24 for prompt in range(24))


def opened(order: MinibatchOrder) -> tuple[int, ...]:
    spec = replace(SPEC, minibatch_order=order)
    situation = seen(spec, as_configured(spec), num_unfinished=48, num_unsubmitted=48)
    situation = replace(situation, generation=replace(situation.generation, hints=HINTS))
    return order_at_opening(situation, short_share=0.25, shorts_a_long=1)


@pytest.mark.parametrize("order", MinibatchOrder)
def test_an_order_has_every_prompt_once(order: MinibatchOrder) -> None:
    assert sorted(opened(order)) == list(range(24))


def test_prompts_of_fixed_minibatches_come_in_the_order_of_these_and_the_longest_first() -> None:
    order = opened(MinibatchOrder.FIXED)
    assert [group // 8 for group in order] == sorted(group // 8 for group in order)
    for minibatch in range(3):
        hints = [HINTS[group] for group in order if group // 8 == minibatch]
        assert hints == sorted(hints, reverse=True)
