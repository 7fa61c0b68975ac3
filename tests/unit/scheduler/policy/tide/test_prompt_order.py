"""The order of prompts when engines hand sequences back."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.policy.tide.prompt_order import order_back
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import job, seen

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)


def test_an_order_has_every_unfinished_group_once() -> None:
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=30, num_unsubmitted=10)
    hints = tuple(100.0 + prompt for prompt in range(24))
    situation = replace(situation, generation=replace(situation.generation, hints=hints))
    back = order_back(situation)
    assert sorted(back) == [group for group in range(24) if situation.generation.unfinished_by_group[group]]
