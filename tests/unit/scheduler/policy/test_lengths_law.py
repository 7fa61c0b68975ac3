"""Expected lengths of unfinished responses, against closed forms and against drawn lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.scheduler.policy.lengths_law import final_lengths, prior
from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.observed import AWAY, CUT, ENDED, Floats, Generation

LAW = LengthLaw(log_mean=math.log(7000), sigma_prompt=0.5, sigma_group=0.25, sigma_hint=0.3, max_tokens=27_000)


def picture(lengths: list[int], places: list[int], *, group_size: int, hints: tuple[float, ...] = ()) -> Generation:
    return Generation((), group_size, tuple(lengths), tuple(places), hints=hints)


def test_without_a_hint_a_prompt_that_has_not_begun_has_the_laws_quantiles() -> None:
    found = final_lengths(picture([0] * 4, [AWAY] * 4, group_size=4), LAW, is_spread=False)
    want = [7000 * math.exp(0.25 * z) for z in (-1.15035, -0.31864, 0.31864, 1.15035)]
    assert found == pytest.approx(want, rel=2e-3)


def test_a_hint_is_believed_as_far_as_hints_are_right() -> None:
    mean, variance = prior(picture([0, 0], [AWAY] * 2, group_size=1, hints=(0.0, 14_000.0)), LAW)
    weight = 0.25 / (0.25 + 0.09)
    assert mean == pytest.approx([math.log(7000), math.log(7000) + weight * math.log(2)])
    assert variance == pytest.approx([0.25, weight * 0.09])


def test_the_level_of_a_prompt_is_the_normal_posterior_of_its_members_lengths() -> None:
    lengths = [9000] * 15 + [1]
    found = final_lengths(picture(lengths, [ENDED] * 15 + [AWAY], group_size=16), LAW, is_spread=False)
    precision, of_members = 1 / 0.25, 15 / 0.0625
    want = math.exp((precision * math.log(7000) + of_members * math.log(9000)) / (precision + of_members))
    assert found[-1] == pytest.approx(want, rel=0.01)
    assert found[:-1] == pytest.approx(9000)


def test_a_response_that_was_cut_counts_as_longer_than_it_is() -> None:
    places = [[ENDED] * 3 + [AWAY], [CUT] * 3 + [AWAY]]
    ended, cut = (final_lengths(picture([20_000] * 3 + [1], each, group_size=4), LAW)[-1] for each in places)
    assert cut > ended * 1.05


def test_an_unfinished_response_gets_longer_than_it_is_and_ends_at_the_laws_most() -> None:
    lengths = [26_999, 26_000, 400]
    found = final_lengths(picture(lengths, [AWAY] * 3, group_size=1), LAW)
    assert np.all(found > lengths)
    assert found.max() <= 27_000


def test_a_finished_response_keeps_its_length() -> None:
    places = [ENDED, AWAY, CUT, AWAY]
    found = final_lengths(picture([90, 400, 26_000, 0], places, group_size=2), LAW)
    assert found[[0, 2]].tolist() == [90.0, 26_000.0]


def test_the_same_picture_gives_the_same_lengths() -> None:
    drawn, hints = _drawn(np.random.default_rng(6))
    places = np.where(drawn <= 6000, ENDED, AWAY).tolist()
    once, again = (
        final_lengths(picture(np.minimum(drawn, 6000).tolist(), places, group_size=16, hints=hints), LAW)
        for _ in range(2)
    )
    assert once.tolist() == again.tolist()


@pytest.mark.parametrize("reached", [0, 6000, 12_000], ids=["nothing is generated", "6,000 tokens", "12,000 tokens"])
def test_forecast_lengths_are_as_far_apart_as_the_true_ones(reached: int) -> None:
    drawn, hints = _drawn(np.random.default_rng(5))
    lengths = np.minimum(drawn, reached)
    places = np.where(drawn <= reached, ENDED, AWAY)
    found = final_lengths(picture(lengths.tolist(), places.tolist(), group_size=16, hints=hints), LAW)
    left, want = (found - lengths).reshape(-1, 16).max(axis=1), (drawn - lengths).reshape(-1, 16).max(axis=1)
    assert left.sum() == pytest.approx(want.sum(), rel=0.06)
    for share in (0.25, 0.5, 0.75, 0.9):
        assert np.quantile(left, share) == pytest.approx(np.quantile(want, share), rel=0.1, abs=200)


@pytest.mark.parametrize("reached", [9000, 14_000, 18_000])
def test_the_last_responses_of_an_iteration_make_as_many_tokens_as_forecast(reached: int) -> None:
    found, want = [], []
    for seed in range(8):
        drawn, hints = _drawn(np.random.default_rng(seed))
        lengths, is_open = np.minimum(drawn, reached), drawn > reached
        places = np.where(is_open, AWAY, ENDED)
        present = picture(lengths.tolist(), places.tolist(), group_size=16, hints=hints)
        found.append((final_lengths(present, LAW) - lengths)[is_open].sum())
        want.append((drawn - lengths)[is_open].sum())
    assert sum(found) == pytest.approx(sum(want), rel=0.05)


def _drawn(rng: np.random.Generator) -> tuple[Floats, tuple[float, ...]]:
    level = 7000 * np.exp(0.5 * rng.standard_normal(512))
    drawn = np.clip(level[:, None] * np.exp(0.25 * rng.standard_normal((512, 16))), 1, 27_000)
    hints = level * np.exp(0.3 * rng.standard_normal(512))
    return np.floor(drawn).reshape(-1), tuple(hints.tolist())
