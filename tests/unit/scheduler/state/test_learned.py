"""A job's measurements replace the assumptions, and newer measurements lower the weight of earlier ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.shell.codecs.plain import to_plain
from services.scheduler.state.costs import ASSUMED_COSTS, ASSUMED_LENGTHS, DecodeStep, LengthLaw
from services.scheduler.state.learned import (
    LENGTHS_WEIGHT,
    MAX_FACTOR,
    Learned,
    with_decoding,
    with_inferring,
    with_lengths,
    with_training,
)
from services.scheduler.state.observed import ENDED, Engine, Generation, Inferring, TrainerRate, Training
from simulator.cost_model import Costs
from simulator.job_spec import measured_costs
from tests.unit.scheduler.situations import gpus
from tidegate.types import Layout

STEP = DecodeStep(floor_s=0.01, base_s=0.0, per_sequence_s=0.0, per_kv_token_s=0.0)


def decoding(*, num_running: int, rate: float) -> Generation:
    engine = Engine(gpus(0, 1), num_running, 0, 100, 1000, 64, rate)
    return Generation((engine,), 1, (5,) * num_running, (0,) * num_running)


def drawn(law: LengthLaw, *, num_prompts: int, group_size: int, seed: int, hinted: bool = False) -> Generation:
    rng = np.random.default_rng(seed)
    level_G = law.log_mean + law.sigma_prompt * rng.standard_normal(num_prompts)
    logs_GM = level_G[:, None] + law.sigma_group * rng.standard_normal((num_prompts, group_size))
    lengths = np.maximum(1, np.exp(logs_GM)).astype(np.int64).ravel().tolist()
    hints = np.exp(level_G + 0.4 + law.sigma_hint * rng.standard_normal(num_prompts)).tolist() if hinted else []
    return Generation((), group_size, tuple(lengths), (ENDED,) * len(lengths), hints=tuple(hints))


def test_before_a_measurement_decoding_is_as_assumed() -> None:
    assert Learned().decode(STEP) == STEP


def test_the_first_picture_of_working_engines_sets_the_factor_of_decode_steps() -> None:
    # Assumed: 8 sequences in a step of 10 ms are 800 tokens/s. The measured rate is 200.
    learned = with_decoding(Learned(), decoding(num_running=8, rate=200.0), STEP)

    assert learned.decode(STEP).floor_s == pytest.approx(0.04)


def test_a_single_odd_picture_changes_a_known_speed_a_little() -> None:
    known = with_decoding(Learned(), decoding(num_running=8, rate=800.0), STEP)

    odd = with_decoding(known, decoding(num_running=8, rate=8.0), STEP)

    assert 1 < odd.decode(STEP).floor_s / STEP.floor_s < 2


def test_engines_that_stand_still_teach_nothing_of_decoding() -> None:
    assert with_decoding(Learned(), decoding(num_running=0, rate=0.0), STEP) == Learned()
    assert with_decoding(Learned(), decoding(num_running=4, rate=0.0), STEP) == Learned()


@pytest.mark.parametrize("rate", [5e-324, 1e300])
def test_a_speed_that_no_engine_has_stays_within_bounds(rate: float) -> None:
    learned = with_decoding(Learned(), decoding(num_running=8, rate=rate), STEP)

    assert 1 / MAX_FACTOR <= learned.decode(STEP).floor_s / STEP.floor_s * (1 + 1e-9) <= MAX_FACTOR * (1 + 1e-6)


def test_the_trainers_rates_are_kept_by_layout_and_the_latest_rate_counts() -> None:
    small, large = TrainerRate(Layout(dp=2), 100.0), TrainerRate(Layout(dp=4), 150.0)
    learned = with_training(Learned(), Training(measured=(large,)))
    learned = with_training(learned, Training(measured=(small,)))
    learned = with_training(learned, Training(measured=(replace(large, rate_tokens_per_s=160.0),)))

    assert {each.layout.dp: each.rate_tokens_per_s for each in learned.rates} == {2: 100.0, 4: 160.0}
    assert with_training(learned, Training()) == learned


def test_the_layout_that_was_trained_in_last_is_the_last_of_the_rates() -> None:
    one, two, three = (TrainerRate(Layout(tp=tp, dp=4 // tp), 100.0) for tp in (1, 2, 4))
    learned = with_training(with_training(Learned(), Training(measured=(two, three))), Training(measured=(one,)))
    assert learned.rates == (two, three, one)
    assert with_training(learned, Training(measured=(three, two))).rates == (one, three, two)


def test_the_latest_update_time_and_inference_rate_count_and_stay_when_a_new_lead_reports_none() -> None:
    assert Learned().costs(ASSUMED_COSTS) == ASSUMED_COSTS
    learned = with_inferring(with_training(Learned(), Training(update_s=0.5)), Inferring((), False, 900.0))
    learned = with_inferring(with_training(learned, Training(update_s=0.25)), Inferring((), False, 800.0))

    again = with_inferring(with_training(learned, Training()), Inferring())

    assert again == learned
    assert again.costs(ASSUMED_COSTS) == replace(ASSUMED_COSTS, update_s=0.25)
    assert again.inference_tokens_per_s == 800.0


def test_a_new_lead_without_a_measured_update_time_replaces_no_rate_that_excludes_one() -> None:
    known, other = TrainerRate(Layout(dp=4), 100.0), TrainerRate(Layout(dp=2), 60.0)
    learned = with_training(Learned(), Training(measured=(known, other), update_s=19.8))
    first = (replace(known, rate_tokens_per_s=70.0), TrainerRate(Layout(dp=8), 150.0))

    again = with_training(learned, Training(measured=first))
    assert again.rates == (other, known, first[1]), "in the order of training"
    assert again.update_s == 19.8

    later = with_training(again, Training(measured=first, update_s=20.1))
    assert (later.rates, later.update_s) == ((other, *first), 20.1)
    assert with_training(Learned(), Training(measured=first)).rates == first, (
        "rates that exclude the assumed update time"
    )


def test_lengths_of_a_whole_iteration_give_the_law_that_they_were_drawn_from() -> None:
    law = LengthLaw(log_mean=7.0, sigma_prompt=0.6, sigma_group=0.3, sigma_hint=0.2)

    learned = with_lengths(Learned(), drawn(law, num_prompts=2000, group_size=8, seed=1, hinted=True), ASSUMED_LENGTHS)

    assert learned.lengths is not None
    assert learned.lengths.log_mean == pytest.approx(7.0, abs=0.05)
    assert learned.lengths.sigma_prompt == pytest.approx(0.6, abs=0.03)
    assert learned.lengths.sigma_group == pytest.approx(0.3, abs=0.01)
    assert learned.lengths.sigma_hint == pytest.approx(0.2, abs=0.02), "a hint that is off by a factor is not noisy"
    assert learned.lengths.max_tokens == ASSUMED_LENGTHS.max_tokens


def test_lengths_of_a_later_iteration_are_averaged_with_those_of_earlier_iterations() -> None:
    law = replace(ASSUMED_LENGTHS, log_mean=5.0)
    learned = with_lengths(Learned(), drawn(law, num_prompts=400, group_size=4, seed=2), ASSUMED_LENGTHS)

    later = with_lengths(
        learned, drawn(replace(law, log_mean=6.0), num_prompts=400, group_size=4, seed=3), ASSUMED_LENGTHS
    )

    assert later.lengths is not None
    assert later.lengths.log_mean == pytest.approx(5.0 + LENGTHS_WEIGHT, abs=0.1)


def test_an_iteration_that_is_not_whole_teaches_no_lengths() -> None:
    whole = drawn(ASSUMED_LENGTHS, num_prompts=4, group_size=2, seed=4)
    broken = replace(whole, places=(*whole.places[:-1], -2))

    assert with_lengths(Learned(), broken, ASSUMED_LENGTHS) == Learned()
    assert with_lengths(Learned(), None, ASSUMED_LENGTHS) == Learned()


def test_groups_of_one_response_and_iterations_of_one_prompt_leave_the_unmeasurable_spread_as_assumed() -> None:
    one_each = drawn(ASSUMED_LENGTHS, num_prompts=50, group_size=1, seed=5)
    one_prompt = drawn(ASSUMED_LENGTHS, num_prompts=1, group_size=50, seed=6)

    singles = with_lengths(Learned(), one_each, ASSUMED_LENGTHS).lengths
    alone = with_lengths(Learned(), one_prompt, ASSUMED_LENGTHS).lengths

    assert singles is not None
    assert alone is not None
    assert singles.sigma_group == ASSUMED_LENGTHS.sigma_group
    assert alone.sigma_prompt == ASSUMED_LENGTHS.sigma_prompt


def test_equal_lengths_keep_a_spread_that_can_be_divided_by() -> None:
    equal = Generation((), 2, (7,) * 8, (ENDED,) * 8)

    law = with_lengths(Learned(), equal, ASSUMED_LENGTHS).lengths

    assert law is not None
    assert law.log_mean == pytest.approx(math.log(7))
    assert min(law.sigma_prompt, law.sigma_group, law.sigma_hint) > 0


def test_old_measurements_fade_with_each_newer_one() -> None:
    learned = with_decoding(Learned(), decoding(num_running=8, rate=8.0), STEP)
    factors = []
    for _ in range(60):
        learned = with_decoding(learned, decoding(num_running=8, rate=800.0), STEP)
        factors.append(learned.decode(STEP).floor_s / STEP.floor_s)

    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(1.0, abs=0.02)


def test_the_result_is_as_small_after_many_iterations_as_after_one() -> None:
    learned, sizes = Learned(), []
    for seed in range(5):
        learned = with_training(learned, Training(measured=(TrainerRate(Layout(dp=2), 100.0 + seed),), update_s=1.5))
        learned = with_decoding(learned, decoding(num_running=8, rate=200.0), STEP)
        learned = with_lengths(
            learned, drawn(ASSUMED_LENGTHS, num_prompts=50, group_size=2, seed=seed), ASSUMED_LENGTHS
        )
        values = json.loads(json.dumps(to_plain(learned)), parse_float=lambda _: 0.0)
        sizes.append(len(json.dumps(values)))

    assert set(sizes) == {sizes[0]}


def test_what_a_job_assumes_is_what_the_simulator_assumes() -> None:
    assert measured_costs(Costs(), Layout()) == ASSUMED_COSTS
