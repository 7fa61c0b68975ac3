"""The split of a trainer and a rollout that runs ahead of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.balance import Flow, Generating, Sizes, Split, balanced, best_split
from services.scheduler.state.costs import DecodeStep

SIZES = Sizes(num_gpus=64, engine=2, copy=4, most_copies=16)


def flow(*, tokens: float = 1e6, rollout: float = 1000, inference: float = 20_000, trainer: float = 2000) -> Flow:
    return Flow(tokens, lambda engines: 2 * rollout * engines, inference, lambda copies: trainer * copies, fixed_s=0.0)


def test_the_stages_of_the_best_split_take_about_as_long() -> None:
    # GPUs by work: 1 / 1000 to 1 / 500 to 1 / 20,000 a token.
    assert best_split(flow(), SIZES) == Split(engines=11, copies=10, inference=2)


@given(rollout=st.floats(1, 1e6), inference=st.floats(1, 1e6), trainer=st.floats(1, 1e6), num_gpus=st.integers(7, 70))
def test_every_stage_has_gpus_and_no_more_are_used_than_there_are(
    rollout: float, inference: float, trainer: float, num_gpus: int
) -> None:
    sizes = Sizes(num_gpus, engine=2, copy=4, most_copies=16)
    found = best_split(flow(rollout=rollout, inference=inference, trainer=trainer), sizes)
    assert min(found.engines, found.copies, found.inference) >= 1
    assert found.engines * 2 + found.copies * 4 + found.inference <= num_gpus


def test_the_best_split_stays() -> None:
    best = best_split(flow(), SIZES)
    assert balanced(best, flow(), SIZES, iterations_left=1000, move_s=0.0) == best


@pytest.mark.parametrize(("iterations_left", "moves"), [(0, False), (1, False), (100, True)])
def test_a_move_pays_for_itself_in_the_iterations_that_are_left(iterations_left: int, moves: bool) -> None:
    now = Split(engines=20, copies=5, inference=4)
    found = balanced(now, flow(), SIZES, iterations_left=iterations_left, move_s=200.0)
    assert (found != now) == moves


def test_a_gain_below_what_measurements_differ_by_moves_nothing() -> None:
    now = best_split(flow(), SIZES)
    assert balanced(now, flow(rollout=1010), SIZES, iterations_left=1000, move_s=0.0) == now


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="6 GPUs are too few for an engine of 2, a copy of 4"):
        best_split(flow(), Sizes(6, engine=2, copy=4, most_copies=4))


def test_more_engines_gain_nothing_where_a_step_takes_as_long_with_fewer_sequences() -> None:
    step = DecodeStep(floor_s=0.014, base_s=0.004, per_sequence_s=1e-5, per_kv_token_s=1e-9)
    few = Generating(step, sequences=100, kv_tokens=1000, max_running=128)
    assert few.tokens_s(20) == pytest.approx(few.tokens_s(10))
    many = Generating(step, sequences=100_000, kv_tokens=1000, max_running=128)
    assert many.tokens_s(20) == pytest.approx(2 * many.tokens_s(10))
