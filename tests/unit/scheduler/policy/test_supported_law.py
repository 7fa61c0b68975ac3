"""The law of lengths that an iteration supports, on drawn lengths."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy.lengths_law import evidences, observed, prior, priors
from services.scheduler.policy.supported_law import supported_law
from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.observed import AWAY, ENDED, Generation

LAW = LengthLaw(log_mean=math.log(7000), sigma_prompt=0.5, sigma_group=0.25, sigma_hint=0.3, max_tokens=27_000)
SEEDS = range(8)


def picture(seed: int, *, until: int, shuffled: bool = False) -> Generation:
    """96 prompts of 8 responses, all at `until` tokens but for those that have ended."""
    random = np.random.default_rng(seed)
    levels = LAW.log_mean + LAW.sigma_prompt * random.standard_normal(96)
    hints = np.exp(levels + LAW.sigma_hint * random.standard_normal(96))
    lengths = np.exp(levels[:, None] + LAW.sigma_group * random.standard_normal((96, 8))).ravel().round()
    hints = random.permutation(hints) if shuffled else hints
    places = np.where(lengths <= until, ENDED, AWAY)
    shown = np.minimum(lengths, until).astype(np.int64)
    return Generation((), 8, tuple(shown.tolist()), tuple(places.tolist()), hints=tuple(hints.tolist()))


@pytest.mark.parametrize("until", [3000, 6000, 12_000])
def test_a_law_that_is_told_right_stays(until: int) -> None:
    assert [supported_law(picture(seed, until=until), LAW) for seed in SEEDS] == [LAW] * len(SEEDS)


def test_before_responses_have_ended_the_law_is_as_told() -> None:
    assert supported_law(picture(0, until=1, shuffled=True), LAW) == LAW


@pytest.mark.parametrize("until", [4000, 12_000])
def test_hints_of_other_prompts_are_dropped(until: int) -> None:
    found = [supported_law(picture(seed, until=until, shuffled=True), LAW) for seed in SEEDS]
    assert all(law.sigma_hint > law.sigma_prompt for law in found)
    assert sum(law.sigma_prompt == LAW.sigma_prompt for law in found) > len(found) / 2


@pytest.mark.parametrize("until", [4000, 12_000])
def test_a_spread_that_is_told_half_is_widened_and_one_that_is_told_twice_is_narrowed(until: int) -> None:
    for told, want in ((0.5, 2.0), (2.0, 0.5)):
        wrong = replace(LAW, sigma_prompt=told * LAW.sigma_prompt, sigma_group=told * LAW.sigma_group)
        found = [supported_law(picture(seed, until=until), wrong) for seed in SEEDS]
        factors = [law.sigma_group / wrong.sigma_group for law in found]
        assert np.median(factors) == pytest.approx(want, rel=0.5)
        assert all((factor > 1) == (want > 1) and factor != 1 for factor in factors)


@pytest.mark.parametrize(("told", "want"), [(0.5, 2.0), (2.0, 0.5)])
def test_hints_tell_a_wrong_spread_before_any_response_has_begun(told: float, want: float) -> None:
    wrong = replace(LAW, sigma_prompt=told * LAW.sigma_prompt, sigma_group=told * LAW.sigma_group)
    opened = [picture(seed, until=0) for seed in SEEDS]
    factors = [supported_law(each, wrong).sigma_prompt / wrong.sigma_prompt for each in opened]
    assert np.median(factors) == pytest.approx(want, rel=0.5)
    assert all(factor == 1 or (factor > 1) == (want > 1) for factor in factors)
    assert [supported_law(each, LAW) for each in opened] == [LAW] * len(opened)
    without_hints = [replace(each, hints=()) for each in opened]
    assert [supported_law(each, wrong) for each in without_hints] == [wrong] * len(opened)


@pytest.mark.parametrize("until", [6000, 12_000])
@pytest.mark.parametrize(("told", "want"), [(0.5, 2.0), (2.0, 0.5)])
def test_a_median_that_is_told_half_is_raised_and_one_that_is_told_twice_is_lowered(
    told: float, want: float, until: int
) -> None:
    wrong = replace(LAW, log_mean=LAW.log_mean + math.log(told))
    found = [supported_law(picture(seed, until=until), wrong) for seed in SEEDS]
    factors = [math.exp(law.log_mean - wrong.log_mean) for law in found]
    assert sum(factor == pytest.approx(want) for factor in factors) > len(factors) / 2
    assert all(factor == 1 or (factor > 1) == (want > 1) for factor in factors)


def test_the_evidence_is_the_likelihood_in_closed_form_where_all_responses_have_ended() -> None:
    seen = picture(0, until=30_000)
    mean, variance = prior(seen, LAW)
    logs = np.log(seen.length_of).reshape(96, 8)
    want = 0.0
    for row, level, of_level in zip(logs, mean, variance, strict=True):
        covariance = LAW.sigma_group**2 * np.eye(8) + of_level
        off = row - level
        want -= 0.5 * (off @ np.linalg.solve(covariance, off) + np.linalg.slogdet(2 * math.pi * covariance)[1])
    (found,) = evidences(observed(seen), mean[None], variance[None], [LAW.sigma_group])
    assert found == pytest.approx(want, abs=1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_evidence_of_a_law_is_the_same_alone_and_among_others_to_the_last_bit(seed: int) -> None:
    """The number of laws that are compared at once must not change which one counts."""
    random = np.random.default_rng(seed)
    shown = picture(seed, until=int(random.integers(500, 15_000)))
    groups = np.sort(random.choice(96, size=int(random.integers(1, 97)), replace=False))
    seen, hints = observed(shown, groups), shown.hint_of[groups] * random.integers(0, 2, size=groups.size)
    sigmas = random.uniform(0.05, 1.0, size=(11, 3))
    laws = [replace(LAW, sigma_prompt=a, sigma_group=b, sigma_hint=c) for a, b, c in sigmas.tolist()]
    together = evidences(seen, *priors(hints, laws), [law.sigma_group for law in laws])
    alone = [evidences(seen, *priors(hints, [law]), [law.sigma_group]) for law in laws]
    assert [[each] for each in together] == alone
