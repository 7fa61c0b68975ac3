"""The published 64-GPU iteration under a static schedule, with the default costs: about 985 s."""

from __future__ import annotations

import pytest

from simulator.bound import clairvoyant_bound
from simulator.happenings import What
from simulator.scenario import parse_scenario
from simulator.world import World
from tidegate.types import Layout

PUBLISHED = {"physics": {"law": "published_fit"}, "cluster": {"nodes": {"n0": 64}, "placement": {"rollout": "0-63"}}}


def static(world: World) -> dict[What, float]:
    """All GPUs generate, then all infer, then all train. Returns the time of the last happening of each kind."""
    cluster = world.gpus.cluster
    ends = {}
    for happening in world.happenings():
        ends[happening.what] = happening.at_s
        if happening.what is What.ROLLOUT_FINISHED:
            world.release_engines(world.rollout.engines)
            world.resize_inference(cluster)
        if happening.what is What.INFERENCE_FINISHED:
            world.resize_inference(())
            world.resize_trainer(cluster, Layout(tp=4, dp=len(cluster) // 4))
    return ends


# The results of an independent model of the same assumptions for these lengths, in whole seconds.
@pytest.mark.parametrize(("seed", "want"), [(1000, (524, 569, 984)), (1001, (536, 582, 1001)), (1002, (527, 570, 975))])
def test_a_static_iteration_takes_the_times_of_an_independent_model(seed: int, want: tuple[int, int, int]) -> None:
    ends = static(parse_scenario(PUBLISHED).world(seed))
    got = (ends[What.ROLLOUT_FINISHED], ends[What.INFERENCE_FINISHED], ends[What.ITERATION_FINISHED])
    assert got == pytest.approx(want, rel=0.005)


def test_the_same_seed_gives_the_same_history_byte_for_byte() -> None:
    scenario = parse_scenario({**PUBLISHED, "algorithm": {"prompts_per_iteration": 64}})
    histories = []
    for _ in range(2):
        world = scenario.world(1)
        static(world)
        histories.append("\n".join(happening.line() for happening in world.history))
    assert histories[0] == histories[1]


def test_the_bound_is_between_half_of_the_static_iteration_and_all_of_it() -> None:
    scenario = parse_scenario(PUBLISHED)
    bound = clairvoyant_bound(scenario.workload(1000), scenario.costs, num_gpus=64)
    assert 985 / 2 < bound.bound_s < 984
