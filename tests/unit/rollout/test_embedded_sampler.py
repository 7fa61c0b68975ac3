"""Draws follow the distribution, and depend only on seed and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.rollout.embedded.sampler import Draw, draw_tokens, philox4x32, uniforms
from services.rollout.engine import SamplingParams

LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.25])
NUM_DRAWS = 20_000
CHI_SQUARE_7_LIMIT = 24.32
"""The limit for 7 degrees of freedom and p = 0.001: 1 in 1000 correct samplers exceeds it. The seeds are fixed."""


def draw_of(*, seed: int = 0, position: int = 0, temperature: float = 1.0, top_p: float = 1.0) -> Draw:
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p, seed=seed)
    return Draw(sampling, position=position)


def chi_square(tokens: list[int], probs: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_the_generator_gives_the_known_answers_of_philox(counter: list[int], key: list[int], want: list[int]) -> None:
    words = [np.array([word], dtype=np.uint64) for word in counter + key]
    got = philox4x32(counter=(words[0], words[1], words[2], words[3]), key=(words[4], words[5]))
    assert [int(word[0]) for word in got] == want


def test_uniform_numbers_stay_below_one_and_use_the_whole_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0, 0], dtype=np.uint64)
    positions = np.array([0, 0, 0, 0, 1, 2**32], dtype=np.uint64)
    got = uniforms(seeds, positions)
    assert len(set(got.tolist())) == 6
    assert ((got >= 0) & (got < 1)).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_by_successive_seeds_or_positions_have_the_distribution_of_the_logits(
    by: str, temperature: float
) -> None:
    draws = [draw_of(**{by: index}, temperature=temperature) for index in range(NUM_DRAWS)]
    tokens, _ = draw_tokens(LOGITS.expand(NUM_DRAWS, -1), draws)
    assert chi_square(tokens, (LOGITS / temperature).softmax(-1)) < CHI_SQUARE_7_LIMIT


def test_successive_positions_of_one_seed_are_independent() -> None:
    tokens, _ = draw_tokens(torch.zeros(2 * NUM_DRAWS, 2), [draw_of(position=i) for i in range(2 * NUM_DRAWS)])
    pairs = [2 * first + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
    assert chi_square(pairs, torch.full((4,), 0.25)) < 16.27  # 3 degrees of freedom, p = 0.001


def test_top_p_draws_from_the_smallest_set_that_reaches_it_and_reports_the_whole_distribution() -> None:
    probs = LOGITS.softmax(-1)
    assert float(probs[[3, 6]].sum()) < 0.7 < float(probs[[3, 6, 0]].sum())
    draws = [draw_of(seed=seed, top_p=0.7) for seed in range(2_000)]
    tokens, log_probs = draw_tokens(LOGITS.expand(2_000, -1), draws)
    assert set(tokens) == {3, 6, 0}
    want = LOGITS.log_softmax(-1)[tokens]
    torch.testing.assert_close(torch.tensor(log_probs), want, atol=1e-6, rtol=0)
    share = float(probs[3] / probs[[3, 6, 0]].sum())
    assert tokens.count(3) / 2_000 == pytest.approx(share, abs=0.04)


def test_a_tiny_top_p_and_temperature_zero_both_take_the_likeliest_token() -> None:
    tokens, log_probs = draw_tokens(LOGITS.expand(2, -1), [draw_of(top_p=1e-9), draw_of(temperature=0)])
    assert tokens == [3, 3]
    assert log_probs == pytest.approx([float(LOGITS.log_softmax(-1)[3])] * 2, abs=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    tokens, _ = draw_tokens(logits.expand(2_000, -1), [draw_of(seed=seed) for seed in range(2_000)])
    assert set(tokens) == {1, 3}


def test_logits_of_nan_give_a_token_of_the_vocabulary_and_a_log_probability_of_nan() -> None:
    (token,), (log_prob,) = draw_tokens(torch.full((1, 5), float("nan")), [draw_of()])
    assert 0 <= token < 5
    assert log_prob != log_prob
