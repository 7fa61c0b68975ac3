"""Noise: by place and seed, and none without a spread."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.noise import EXACT, Noise, NoiseSection
from simulator.scenario import parse_scenario
from simulator.world import World

SCENARIO = {
    "physics": {"law": "published_fit"},
    "cluster": {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6-7"}},
    "algorithm": {"prompts_per_iteration": 8, "group_size": 4, "n_minibatches": 2},
    "lengths": {"median_tokens": 200, "max_tokens": 1000},
}


def ended(noise: dict[str, float], seed: int = 0) -> World:
    world = parse_scenario(SCENARIO | {"noise": noise}).world(seed)
    list(world.happenings())
    return world


def test_without_a_spread_every_factor_is_1() -> None:
    assert EXACT.of_engine(3, 4) == EXACT.of_portion(5) == 1.0
    assert ended({}).history == ended({"engine_sigma": 0.0, "step_sigma": 0.0, "portion_sigma": 0.0}).history


def test_a_seed_gives_the_same_factors_in_any_order_and_another_seed_gives_others() -> None:
    section = NoiseSection(engine_sigma=0.1, step_sigma=0.1, portion_sigma=0.1)
    one, other = Noise(section, 1), Noise(section, 2)
    forward = [one.of_engine(engine, 0) for engine in range(5)]
    backward = [one.of_engine(engine, 0) for engine in reversed(range(5))]
    assert forward == backward[::-1]
    assert forward != [other.of_engine(engine, 0) for engine in range(5)]
    assert one.of_portion(0) != one.of_portion(1)


def test_the_logarithms_of_the_factors_have_the_spread() -> None:
    noise = Noise(NoiseSection(portion_sigma=0.2))
    logs = np.log([noise.of_portion(number) for number in range(2000)])
    assert (logs.mean(), logs.std()) == (pytest.approx(0, abs=0.02), pytest.approx(0.2, rel=0.05))


@pytest.mark.parametrize("kind", ["engine_sigma", "step_sigma", "portion_sigma"])
def test_each_kind_of_noise_changes_the_iteration_and_the_same_seed_repeats_it(kind: str) -> None:
    exact, noisy, again = ended({}), ended({kind: 0.3}), ended({kind: 0.3})
    assert noisy.history == again.history
    assert noisy.history != exact.history
    assert noisy.history != ended({kind: 0.3}, seed=1).history
    assert len(noisy.trainer.trained) == len(exact.trainer.trained) == 8
