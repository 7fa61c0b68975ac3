"""Orders of prompts when an iteration opens, and the policies that give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy import Policy
from services.scheduler.policy.opening_order import (
    SHORT_SHARE,
    longest_first,
    opening_order,
    places_of_shorts,
    short_between_long,
)
from services.scheduler.policy.phases import PhasesPolicy
from services.scheduler.policy.registry import policy_of
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.situation import Situation
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.state.remembered import Remembered, as_configured
from tests.unit.scheduler.situations import after, job, seen
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.types import PromptOrder

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)
RISING = tuple(100.0 + prompt for prompt in range(24))
ORDERED: dict[str, Callable[[PromptOrder], Policy]] = {
    "static": StaticPolicy,
    "static, collocated": PhasesPolicy,
    "rlinf": lambda order: RLinfPolicy(RLinfRules(8, auto_scheduler=True, use_pre_process_policy=True, order=order)),
    "rlinf that is off": lambda order: RLinfPolicy(RLinfRules(8, auto_scheduler=False, order=order)),
}


def hinted(hints: tuple[float, ...] = RISING, *, num_unfinished: int = 30, num_unsubmitted: int = 10) -> Situation:
    situation = seen(
        SPEC,
        as_configured(SPEC),
        num_unfinished=num_unfinished,
        num_unsubmitted=num_unsubmitted,
        remembered=Remembered(),
    )
    return replace(situation, generation=replace(situation.generation, hints=hints))


@pytest.mark.parametrize("shorts_a_long", [1, 3])
def test_an_order_has_every_group_once(shorts_a_long: int) -> None:
    situation = hinted()
    assert sorted(short_between_long(situation, 0.25, shorts_a_long=shorts_a_long)) == list(range(24))
    assert longest_first(situation) == tuple(reversed(range(24)))


def test_without_useful_hints_there_is_no_order() -> None:
    vague = hinted()
    law = replace(vague.lengths, sigma_hint=1.1 * vague.lengths.sigma_prompt)
    for situation in (hinted(()), replace(vague, lengths=law)):
        assert not short_between_long(situation, 0.25)
        assert not longest_first(situation)


@pytest.mark.parametrize("groups_at_once", [2, 4, 8, 16])
def test_dealt_to_engines_in_turn_no_engine_gets_the_long_prompts_alone(groups_at_once: int) -> None:
    """So many groups have as many responses as there are engines: each place in this row is the same engines'."""
    num = 512
    is_short = np.argsort(np.concatenate((places_of_shorts(num, 1), np.arange(num))), kind="stable") < num
    by_place = is_short.reshape(-1, groups_at_once).mean(axis=0)
    assert by_place.min() >= 0.4
    assert by_place.max() <= 0.6


def test_prompts_of_the_same_length_keep_their_order() -> None:
    assert longest_first(hinted((100.0,) * 24)) == tuple(range(24))


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("order", PromptOrder)
def test_an_order_stays_while_the_iteration_runs(name: str, order: PromptOrder) -> None:
    policy = ORDERED[name](order)
    first = policy.choose(hinted())
    assert first.group_order == opening_order(hinted(), order)
    assert bool(first.group_order) is (order is not PromptOrder.AS_GIVEN)
    later = replace(hinted(num_unfinished=3, num_unsubmitted=0), remembered=after(first))
    assert policy.choose(later).group_order == first.group_order
    ended = replace(hinted(num_unfinished=0, num_unsubmitted=0), remembered=after(first))
    assert not policy.choose(ended).group_order


@pytest.mark.parametrize("name", ORDERED)
def test_an_order_changes_nothing_else(name: str) -> None:
    plain, ordered = (
        ORDERED[name](order).choose(hinted()) for order in (PromptOrder.AS_GIVEN, PromptOrder.LONGEST_FIRST)
    )
    assert replace(ordered, group_order=()) == plain


def test_the_order_is_that_of_the_config() -> None:
    section = SchedulerSection.model_validate({"policy": "static", "static": {"order": "longest_first"}})
    assert policy_of(section) == StaticPolicy(PromptOrder.LONGEST_FIRST)
    section = SchedulerSection.model_validate(
        {"policy": "static", "static": {"order": "short_between_long", "collocated": True}}
    )
    assert policy_of(section) == PhasesPolicy(PromptOrder.SHORT_BETWEEN_LONG)


def test_the_share_of_short_prompts_is_tides() -> None:
    assert TideRules().short_share == SHORT_SHARE
