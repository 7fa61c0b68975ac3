"""The GPUs of one 7B iteration on 64 H100, as DynaRL published them, and their replay in a world.

Each step has the second from which its split holds, as a share of the published static iteration of 985 s, so that an
iteration with a little more or less work is split at the same stage of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.gpus import Holder
from simulator.happenings import What
from simulator.scenario import Scenario
from simulator.world import World
from tidegate.types import GpuId, Layout

STATIC_S, DYNAMIC_S = 985.0, 735.0
STATIC_ENDS_S = (505.0, 550.0, STATIC_S)
"""The ends of rollout, inference and training when all GPUs do one after the other."""


@dataclass(frozen=True, slots=True)
class Step:
    """`rollout`, `trainer`, `inference`: GPUs. The rest belongs to nobody."""

    at_s: float
    rollout: int
    trainer: int
    inference: int


TRAJECTORY = (Step(0, 64, 0, 0), Step(258, 40, 16, 8), Step(430, 16, 32, 8), Step(540, 4, 52, 8))
COPY = 4
"""GPUs of a data-parallel copy of the trainer: TP 4."""


def static_ends(scenario: Scenario, seed: int) -> tuple[float, float, float]:
    """Rollout, inference and training on all GPUs, one after the other: the seconds at which each ends."""
    world, ends = scenario.world(seed), dict[What, float]()
    cluster = world.gpus.cluster
    for happening in world.happenings():
        ends[happening.what] = happening.at_s
        if happening.what is What.ROLLOUT_FINISHED:
            world.release_engines(world.rollout.engines)
            world.resize_inference(cluster)
        if happening.what is What.INFERENCE_FINISHED:
            world.resize_inference(())
            world.resize_trainer(cluster, Layout(tp=COPY, dp=len(cluster) // COPY))
    return ends[What.ROLLOUT_FINISHED], ends[What.INFERENCE_FINISHED], ends[What.ITERATION_FINISHED]


def replayed_s(scenario: Scenario, seed: int) -> float:
    """The seconds of the iteration under the published splits."""
    scale = static_ends(scenario, seed)[2] / STATIC_S
    world = scenario.world(seed)
    for number, step in enumerate(TRAJECTORY):
        world.wake_at(step.at_s * scale, number)
    for happening in world.happenings():
        if happening.what is What.WOKE and happening.number:
            follow(world, TRAJECTORY[happening.number])
    return world.now_s


def follow(world: World, step: Step) -> None:
    """Release the engines beyond the step's, and give their GPUs to the inference and the trainer."""
    size = world.costs.engine.gpus_per_engine
    engines = sorted(world.rollout.engines)
    leaving = engines[step.rollout // size :]
    coming: list[GpuId] = [*world.gpus.held_by(Holder.FREE)]
    coming += [gpu for name in leaving for gpu in world.rollout.engines[name].gpus]
    world.release_engines(leaving)
    if missing := step.inference - len(world.inference.gpus):
        world.resize_inference((*world.inference.gpus, *coming[:missing]))
        coming = coming[missing:]
    own = world.trainer.gpus
    world.resize_trainer((*own, *coming[: step.trainer - len(own)]), Layout(tp=COPY, dp=step.trainer // COPY))
