"""Forecasts of plans that no simulation would carry out. `test_foresight` has those that one does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy.situation import Inference
from services.scheduler.policy.tide.cluster import Plans, cluster_of, gpus_there
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.policy.tide.outlook import outlook
from services.scheduler.state.observed import ENDED, Inferring, TrainerRate
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import JobSpec
from tests.unit.scheduler.situations import COSTS, generation, gpus, job, seen
from tidegate.types import Layout, MinibatchOrder

SPEC = job(actor=4, rollout=10, inference=2, actor_tp=2, rollout_tp=2, prompts=32, group_size=4, minibatches=1)
ALL_GENERATE = Assignment(tuple(gpus(start, start + 2) for start in range(0, 16, 2)), None, ())


TWO_MINIBATCHES = replace(SPEC, num_minibatches=2)
RATES = (TrainerRate(Layout(tp=2, dp=2), 500.0),)


def forecast(*, num_waiting: int = 0, num_unfinished: int = 64, spec: JobSpec = SPEC) -> Forecast:
    """8 engines of 8 slots run 64 sequences, which make 4,000 tokens yet. `num_waiting` others wait."""
    num_unfinished += num_waiting
    situation = seen(
        spec,
        ALL_GENERATE,
        num_unfinished=num_unfinished,
        num_unsubmitted=num_waiting,
        max_running=8,
        length=8000,
        measured=RATES,
    )
    cluster = cluster_of(situation, ALL_GENERATE, gpus_there(situation))
    final = np.full(len(situation.generation.lengths), 8000.0)
    return Forecast(outlook(situation, final, num_slots=64), cluster, COSTS)


def plan(*, trainer: int, inference: int) -> Plans:
    return Plans(np.zeros(1), np.array([[trainer]]), np.array([[inference]]))


@pytest.mark.parametrize(("trainer", "inference", "ends"), [(0, 2, False), (4, 0, False), (4, 2, True)])
def test_a_plan_that_leaves_work_without_gpus_never_ends(trainer: int, inference: int, ends: bool) -> None:
    (end_s,) = forecast().ends_s(plan(trainer=trainer, inference=inference))
    assert np.isfinite(end_s) == ends


def test_half_of_the_engines_take_at_most_twice_as_long_for_more_sequences_than_slots() -> None:
    ends_s = [float(forecast().ends_s(plan(trainer=trainer, inference=2))[0]) for trainer in (6, 10, 12)]
    assert ends_s == sorted(ends_s)
    four, two, one = ends_s
    assert two <= 2 * four
    assert one <= 2 * two


@pytest.mark.parametrize("num_waiting", [0, 4, 40])
def test_engines_that_leave_take_no_work_with_them_however_few_wait(num_waiting: int) -> None:
    """With one engine of eight left, a step makes eight tokens."""
    found = forecast(num_waiting=num_waiting)
    (end_s,) = found.ends_s(plan(trainer=12, inference=2))
    assert end_s >= 0.97 * (64 + num_waiting) * 4000 / 8 * COSTS.decode.floor_s


def test_a_plan_that_hands_nothing_back_is_not_changed_by_one_that_does() -> None:
    own = forecast(num_waiting=4, spec=replace(SPEC, num_minibatches=3))
    sizes = [[4, 4, 4], [4, 10, 10], [4, 8, 12]]
    plans = Plans(np.zeros(3), np.array(sizes), np.full((3, 3), 2))
    alone = [own.ends_s(plans.row(at))[0] for at in range(3)]
    assert own.ends_s(plans).tolist() == alone


def test_a_trainer_that_cannot_move_in_a_minibatch_keeps_to_its_plan_after_the_rollouts_end() -> None:
    """Only one that carries gradients gets the engines' GPUs in any case."""
    own = forecast(spec=TWO_MINIBATCHES)
    own = replace(own, cluster=replace(own.cluster, kv_capacity_tokens=10**7))
    small, large = (Plans(np.zeros(1), np.array([[4, last]]), np.array([[2, 2]])) for last in (4, 12))
    assert own.ends_s(small)[0] > own.ends_s(large)[0] + 10
    carries = replace(own, cluster=replace(own.cluster, carries=True))
    assert carries.ends_s(small)[0] == pytest.approx(carries.ends_s(large)[0], rel=0.05)


def end_s(
    *,
    ahead: int | None,
    order: MinibatchOrder = MinibatchOrder.ARRIVAL,
    num_prompts: int = 32,
    last: float = 1400.0,
    inference: int = 1,
    copy_size: int = 1,
    unevenness: float = 0.0,
) -> float:
    """The end of an iteration with one response of each group left, on some GPUs of a slow inference. `ahead`: tokens
    that are scored; None: inference does not score ahead."""
    spec = replace(SPEC, scores_ahead=ahead is not None, minibatch_order=order, num_prompts=num_prompts)
    is_last = np.arange(spec.num_prompts * spec.group_size) % spec.group_size == spec.group_size - 1
    places = tuple(np.where(is_last, np.arange(is_last.size) % 8, ENDED).tolist())
    picture = generation(spec, ALL_GENERATE.engines, lengths=(1000,) * is_last.size, places=places)
    situation = seen(spec, ALL_GENERATE, picture=picture, measured=(TrainerRate(Layout(tp=2, dp=2), 1e6),))
    scorer = Inference(ALL_GENERATE.inference, 1000.0, Inferring(num_tokens_ahead=ahead or 0))
    situation = replace(situation, inference=scorer)
    left = replace(outlook(situation, np.where(is_last, last, 1000.0), num_slots=8192), unevenness=unevenness)
    own = cluster_of(situation, ALL_GENERATE, gpus_there(situation))
    cluster = replace(own, copy_size=copy_size, kv_capacity_tokens=10**7)
    (end,) = Forecast(left, cluster, COSTS).ends_s(plan(trainer=4, inference=inference))
    return float(end)


@pytest.mark.parametrize("order", MinibatchOrder)
def test_scoring_ahead_is_not_later_than_scoring_whole_groups(order: MinibatchOrder) -> None:
    assert end_s(ahead=0, order=order) <= end_s(ahead=None, order=order)


def test_what_is_scored_ahead_shortens_the_rest_by_its_tokens() -> None:
    nothing, some, most = (end_s(ahead=tokens) for tokens in (0, 10_000, 20_000))
    assert nothing - some == pytest.approx(10.0)
    assert some - most == pytest.approx(10.0)


def test_no_more_is_scored_ahead_than_has_ended() -> None:
    """The last responses, 32 of 1400 tokens at 1000 a second, are left in any case."""
    most, more = (end_s(ahead=tokens) for tokens in (96_000, 10**9))
    assert more == most >= 32 * 1.4


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_copies_that_score_ahead_wait_for_the_longest_response(share: float) -> None:
    """Four copies do this share of their work, as no complete group waits: 32 groups have 8,000 tokens each."""
    unevenness = -math.log(share) / math.log(4)
    found_s = end_s(ahead=0, last=5000.0, inference=4, unevenness=unevenness)
    begins_s = COSTS.release_s + COSTS.inference_start_s
    assert found_s == pytest.approx(begins_s + 32 * 8000 / (4 * 1000) / share, rel=0.01)


def test_a_response_is_scored_by_one_copy_of_several_gpus() -> None:
    """The last response of the one group has 5,000 tokens, at 1,000 a second and GPU."""
    one, four = (end_s(ahead=3000, num_prompts=1, last=5000.0, inference=4, copy_size=size) for size in (1, 4))
    assert one - four == pytest.approx(5.0 - 5.0 / 4, abs=0.01)


def test_engines_that_are_asked_ahead_do_nothing_until_the_minibatch_ends() -> None:
    own = forecast(spec=TWO_MINIBATCHES)
    is_open = replace(own.cluster, is_open=True, until_s=10.0, num_trainer_gpus=4)
    costs = [replace(COSTS, release_s=release_s) for release_s in (0.0, 3.0)]
    soon, late = (
        float(replace(own, cluster=is_open, costs=each).ends_s(plan(trainer=12, inference=2))[0]) for each in costs
    )
    assert late - soon >= 3.0 * 7, "seven of eight engines leave"


def test_engines_that_leave_ahead_delay_by_no_more_than_their_absence_where_others_have_room() -> None:
    """One sequence an engine: the others take those that come to them at the same speed."""
    own = forecast(num_unfinished=8, spec=TWO_MINIBATCHES)
    is_open = replace(own.cluster, is_open=True, until_s=10.0, num_trainer_gpus=4, kv_capacity_tokens=10**7)
    soon, late = (replace(own, cluster=is_open, costs=replace(COSTS, release_s=release_s)) for release_s in (0.0, 3.0))
    ends_s = [float(each.ends_s(plan(trainer=10, inference=2))[0]) for each in (soon, late)]
    assert ends_s[1] - ends_s[0] <= 3.0
