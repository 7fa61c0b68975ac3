"""Orders of prompts, at the start and when engines hand sequences back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.policy.situation import Situation
from services.scheduler.policy.tide.prompt_order import order_back, short_between_long
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import job, seen

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)


def hinted(hints: tuple[float, ...]) -> Situation:
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=30, num_unsubmitted=10)
    return replace(situation, generation=replace(situation.generation, hints=hints))


@pytest.mark.parametrize("shorts_a_long", [1, 3])
def test_an_order_has_every_group_once(shorts_a_long: int) -> None:
    situation = hinted(tuple(100.0 + prompt for prompt in range(24)))
    assert sorted(short_between_long(situation, 0.25, shorts_a_long=shorts_a_long)) == list(range(24))
    back = order_back(situation)
    assert sorted(back) == [group for group in range(24) if situation.generation.unfinished_by_group[group]]


def test_without_useful_hints_the_start_has_no_order() -> None:
    assert short_between_long(hinted(()), 0.25) == ()
    vague = hinted(tuple(100.0 + prompt for prompt in range(24)))
    law = replace(vague.lengths, sigma_hint=1.1 * vague.lengths.sigma_prompt)
    assert short_between_long(replace(vague, lengths=law), 0.25) == ()
