"""The order of prompts when engines hand sequences back."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.policy.tide.prompt_order import opening_orders, order_back
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import job, seen
from tidegate.types import MinibatchOrder

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)


def test_an_order_has_every_unfinished_group_once() -> None:
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=30, num_unsubmitted=10)
    hints = tuple(100.0 + prompt for prompt in range(24))
    situation = replace(situation, generation=replace(situation.generation, hints=hints))
    back = order_back(situation)
    assert sorted(back) == [group for group in range(24) if situation.generation.unfinished_by_group[group]]


def test_groups_of_fixed_minibatches_come_in_the_order_of_these() -> None:
    spec = replace(SPEC, minibatch_order=MinibatchOrder.FIXED)
    situation = seen(spec, as_configured(spec), num_unfinished=30, num_unsubmitted=10)
    falling = tuple(100.0 + 7 * prompt % 24 for prompt in range(24))
    situation = replace(situation, generation=replace(situation.generation, hints=falling))
    queued = {sequence // 2 for sequence in situation.generation.queue}
    running = [group // 8 for group in order_back(situation) if group not in queued]
    assert running == sorted(running)
    by_minibatch, longest = opening_orders(situation, short_share=0.25, shorts_a_long=1)
    assert [group // 8 for group in by_minibatch] == sorted(group // 8 for group in by_minibatch)
    assert sorted(by_minibatch) == sorted(longest) == list(range(24))
    for minibatch in range(3):
        hints = [falling[group] for group in by_minibatch if group // 8 == minibatch]
        assert hints == sorted(hints, reverse=True)
