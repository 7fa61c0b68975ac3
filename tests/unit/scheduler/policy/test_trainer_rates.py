"""The trainer's curve by hand: assumed, corrected where minibatches were measured, the same for every policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import inf

import numpy as np
import pytest

from services.scheduler.policy.situation import Situation, Split
from services.scheduler.policy.stages import remaining_work, slowest_stage_s
from services.scheduler.policy.tide.cluster import cluster_of, gpus_there
from services.scheduler.policy.trainer_rates import trainer_curve
from services.scheduler.state.costs import Rates
from services.scheduler.state.observed import TrainerRate
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import job, seen
from tidegate.types import Layout

ASSUMED = Rates(trainer=((2, 100.0), (8, 200.0)), inference_tokens_per_s_per_gpu=1e9)
"""The square root of the GPUs."""
SPEC = replace(job(actor=2, rollout=12, inference=2, prompts=64, group_size=24, minibatches=2), rates=ASSUMED)
"""768 sequences a minibatch."""


def measured(*rates: tuple[int, float], tp: int = 1) -> Situation:
    """By the number of copies."""
    rates_seen = tuple(TrainerRate(Layout(tp=tp, dp=dp), rate) for dp, rate in rates)
    return seen(SPEC, as_configured(SPEC), measured=rates_seen)


def curve(situation: Situation, *sizes: int) -> list[float]:
    found: list[float] = trainer_curve(situation).tokens_per_s(np.array(sizes), copy_size=1).tolist()
    return found


def test_before_a_minibatch_was_measured_the_curve_is_the_assumed_one() -> None:
    assert curve(measured(), 2, 4, 8) == pytest.approx([100.0, 100 * 2**0.5, 200.0])
    assert curve(measured(), 1, 16) == pytest.approx([100 * 0.5**0.5, 200 * 2**0.5])


@pytest.mark.parametrize(
    ("rates", "want"),
    [
        pytest.param(((4, 100.0),), {1: 25.0, 4: 100.0, 16: 400.0}, id="one rate: in proportion"),
        pytest.param(((2, 100.0), (4, 90.0)), {1: 100.0, 8: 90.0}, id="more GPUs are slower: no further"),
        pytest.param(((2, 100.0), (4, 300.0)), {1: 50.0, 8: 600.0}, id="above proportion: in proportion"),
        pytest.param(((1, 100.0), (2, 200.0), (8, 400.0)), {16: 400 * 2**0.5}, id="the outermost segment's power"),
    ],
)
def test_beyond_its_rates_the_curve_goes_on_as_its_outermost_segment(
    rates: tuple[tuple[int, float], ...], want: dict[int, float]
) -> None:
    spec = replace(SPEC, rates=replace(ASSUMED, trainer=rates))
    found = trainer_curve(seen(spec, as_configured(spec))).tokens_per_s(np.array(list(want)), copy_size=1)
    assert found.tolist() == pytest.approx(list(want.values()))


def test_one_measured_layout_corrects_all_by_its_factor() -> None:
    assert curve(measured((4, 120 * 2**0.5)), 1, 2, 4, 8) == pytest.approx(
        [1.2 * rate for rate in curve(measured(), 1, 2, 4, 8)], rel=1e-5
    )


def test_the_prediction_is_what_was_measured() -> None:
    found = curve(measured((2, 90.0), (3, 130.0), (8, 260.0)), 2, 3, 8)
    assert found == pytest.approx([90.0, 130.0, 260.0], rel=1e-5)


def test_between_two_measured_layouts_the_correction_is_a_power_and_beyond_them_the_nearest_ones() -> None:
    # 20 % more at 2, 20 % less at 8: in the middle of the logarithms the geometric mean of both.
    found, assumed = curve(measured((8, 160.0), (2, 120.0)), 1, 2, 4, 8, 16), curve(measured(), 1, 2, 4, 8, 16)
    assert np.array(found) / assumed == pytest.approx([1.2, 1.2, 0.96**0.5, 0.8, 0.8], rel=1e-5)


def test_a_measurement_equal_to_the_assumption_changes_nothing_to_the_bit() -> None:
    sizes = tuple(range(1, 17))
    equal = measured((5, curve(measured(), 5)[0]), (4, 100 * 2**0.5), (8, 200.0))
    assert curve(equal, *sizes) == curve(measured(), *sizes)


def test_of_two_measured_layouts_on_as_many_gpus_the_last_counts() -> None:
    for first, last in permutations((Layout(pp=2, dp=2), Layout(tp=2, dp=2))):
        two = (TrainerRate(first, 1.0), TrainerRate(last, 300.0))
        situation = seen(SPEC, as_configured(SPEC), measured=two)
        assert curve(situation, 4) == pytest.approx([300.0], rel=1e-5)


def test_layouts_of_other_copies_than_the_actors_count_only_where_none_of_its_own_was_measured() -> None:
    other, own = TrainerRate(Layout(tp=2, dp=2), 20.0), TrainerRate(Layout(dp=4), 240.0)
    before = measured((1, 10.0), (2, 20.0), tp=2)
    assert curve(before, 2, 4) == pytest.approx([10.0, 20.0], rel=1e-5)
    for both in permutations((other, own, TrainerRate(Layout(tp=2, dp=4), 10.0))):
        moved = seen(SPEC, as_configured(SPEC), measured=both)
        assert curve(moved, 2, 4, 8) == curve(measured((4, 240.0)), 2, 4, 8), "neither at their sizes nor beyond"


def test_an_uneven_split_is_measured_and_predicted_at_the_pace_of_its_fullest_copy() -> None:
    few = replace(SPEC, num_prompts=8, group_size=3)
    situation = seen(few, as_configured(few), measured=(TrainerRate(Layout(dp=5), 96.0),))
    # 12 sequences over 5 copies: one has 3 where a fair share is 2.4.
    assert curve(situation, 5) == pytest.approx([96.0], rel=1e-5)
    assumed = curve(seen(few, as_configured(few)), 5)
    assert assumed == pytest.approx([100 * 2.5**0.5 / 1.25])
    assert curve(situation, 4) == pytest.approx([200 / 2**0.5 * 96.0 / assumed[0]], rel=1e-5), "4 divide them"


def test_every_policy_reckons_with_what_was_measured() -> None:
    slow, fast = measured((2, 50.0)), measured((2, 200.0))
    for situation, want in ((slow, 0.5), (fast, 2.0)):
        cluster = cluster_of(situation, as_configured(SPEC), gpus_there(situation))
        assert cluster.unit_rates[[2, 8]] == pytest.approx([100 * want, 200 * want], rel=1e-5), "tide"
        left = replace(remaining_work(situation, uses_hints=False), to_train_tokens=1000.0, to_infer_tokens=0.0)
        train_s = slowest_stage_s(situation, left, Split(0, 2, 2))
        assert train_s == pytest.approx(1000 / (100 * want), rel=1e-5), "dynarl"


def test_rates_of_no_size_or_of_nothing_or_without_bounds_are_refused() -> None:
    for wrong in ((), ((0, 1.0),), ((2, 0.0),), ((2, inf),)):
        with pytest.raises(ValueError, match="give at least one, each finite and above 0"):
            Rates(trainer=wrong, inference_tokens_per_s_per_gpu=1.0)
    for rate in (0.0, inf):
        with pytest.raises(ValueError, match="tokens/s a GPU; give one that is finite and above 0"):
            Rates(trainer=((1, 1.0),), inference_tokens_per_s_per_gpu=rate)
