"""Closed forms against the sum of single steps, and the sources of all fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simulator.assumptions import assumptions_of
from simulator.cost_model import Costs, EngineCosts, SwitchCosts, TrainerCosts, busiest_bytes, even_split, imbalance
from tidegate.config.base import fields_of
from tidegate.elastic.plan.planner import RankTraffic
from tidegate.types import Layout

engines = st.builds(
    EngineCosts,
    step_floor_s=st.sampled_from([0.0, 0.0141, 0.03]),
    step_per_sequence_s=st.sampled_from([0.0, 1.5e-5]),
    step_per_kv_token_s=st.sampled_from([0.0, 9e-9, 1e-6]),
)
running = st.integers(1, 128)
cached = st.integers(0, 2_000_000)


def one_by_one(costs: EngineCosts, *, running: int, kv_tokens: int, steps: int) -> float:
    seconds = 0.0
    for step in range(steps):
        cached = kv_tokens + step * running
        line = costs.step_base_s + costs.step_per_sequence_s * running + costs.step_per_kv_token_s * cached
        seconds += max(costs.step_floor_s, line)
    return seconds


@given(engines, running, cached, st.integers(0, 500))
def test_the_closed_form_of_decoding_is_the_sum_of_its_steps(
    costs: EngineCosts, running: int, kv_tokens: int, steps: int
) -> None:
    want = one_by_one(costs, running=running, kv_tokens=kv_tokens, steps=steps)
    assert costs.decode_s(running=running, kv_tokens=kv_tokens, steps=steps) == pytest.approx(want, rel=1e-9)


@given(engines, running, cached, st.floats(0, 100))
def test_the_steps_within_a_time_fit_it_and_one_more_does_not(
    costs: EngineCosts, running: int, kv_tokens: int, seconds: float
) -> None:
    steps = costs.steps_within(seconds, running=running, kv_tokens=kv_tokens)
    assert costs.decode_s(running=running, kv_tokens=kv_tokens, steps=steps) <= seconds or steps == 0
    assert costs.decode_s(running=running, kv_tokens=kv_tokens, steps=steps + 1) > seconds


@given(st.integers(1, 500), st.integers(1, 64))
def test_a_split_covers_all_items_and_two_parts_differ_by_at_most_one(count: int, parts: int) -> None:
    split = even_split(count, parts)
    assert sum(split) == count
    assert max(split) - min(split) <= 1


def test_2048_responses_on_24_replicas_take_the_time_of_the_largest_share() -> None:
    assert imbalance(128 * 16, 24) == pytest.approx(86 * 24 / 2048)


def test_the_rate_of_a_trainer_depends_on_its_gpus_and_the_efficiency_of_its_layout() -> None:
    costs = TrainerCosts(exponent=0.5, layout_efficiency={"tp4-dp4": 2.0})
    assert costs.tokens_s(182_000, Layout(tp=4, dp=16)) == pytest.approx(1.0)
    assert costs.tokens_s(182_000, Layout(tp=2, dp=8)) == pytest.approx(2.0)
    assert costs.tokens_s(182_000, Layout(tp=4, dp=4)) == pytest.approx(1.0)


def test_the_time_of_a_reshard_is_that_of_its_busiest_rank_or_the_published_one() -> None:
    costs = SwitchCosts(reshard_s=3.0, reshard_setup_s=0.5, communicators_s=0.25, reshard_bytes_per_s=10.0)
    assert costs.resharding_s(None, is_new=True) == costs.resharding_s(None, is_new=False) == 3.0
    assert costs.resharding_s(20, is_new=True) == pytest.approx(2.75)
    assert costs.resharding_s(20, is_new=False) == 2.5
    assert busiest_bytes([RankTraffic(3, 7), RankTraffic(5, 0)]) == 7
    assert busiest_bytes([]) == 0


def test_every_field_of_the_costs_has_a_source() -> None:
    found = {each.key: each.source for each in assumptions_of(Costs())}
    assert list(found) == [".".join(path) for path, _ in fields_of(Costs)]
    assert all(found.values())


def test_a_malformed_layout_name_is_refused() -> None:
    with pytest.raises(ValidationError, match="layout_efficiency"):
        TrainerCosts(layout_efficiency={"tp4xdp4": 2.0})
