"""Parts of an iteration in collocated phases, apart: generation up to a moment, and all that comes after it.

In phases nothing but generation runs until it ends. So an iteration whose rollout ends early is the sum of both parts:

    iteration_s = seconds of `generate` + `after_rollout_s` of the responses that it trains

Invariants:
- With no early end the sum is the iteration under `static`, collocated. [test_generation: sum_is_the_iteration]
- A response that an earlier round began goes on from its tokens. [test_generation: goes_on_from_its_tokens]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.scheduler.state.layouts import most_copies
from services.scheduler.state.values import Placed
from simulator.happenings import What
from simulator.lengths import Lengths
from simulator.scenario import Scenario
from simulator.world import Placement, World
from tidegate.types import GpuId, Layout


@dataclass(frozen=True, slots=True)
class Response:
    """A response of one turn. `generated`: the tokens that an earlier round made, of its `tokens`."""

    tokens: int
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Generated:
    """`ended`: the numbers of the responses that have ended, in the order of their ends. `tokens`: by response, those
    that it has."""

    seconds: float
    ended: tuple[int, ...]
    tokens: tuple[int, ...]


def generate(
    scenario: Scenario, responses: Sequence[Response], *, is_enough: Callable[[int], bool] = lambda number: False
) -> Generated:
    """All GPUs of the cluster generate the responses, the first ones first. `is_enough` is asked with the number of
    each response that ends; True ends the rollout."""
    lengths = Lengths(tuple(((each.tokens,),) for each in responses), (0.0,) * len(responses))
    world = rollout_world(scenario, lengths)
    for sequence, response in zip(world.rollout.sequences, responses, strict=True):
        sequence.generated = response.generated
    ended = []
    for happening in world.happenings():
        if happening.what is What.SEQUENCE_FINISHED:
            ended.append(happening.number)
            if is_enough(happening.number):
                break
        if happening.what is What.ROLLOUT_FINISHED:
            break
    world.rollout.advance()
    tokens = [sequence.generated for sequence in world.rollout.sequences]
    for engine in world.rollout.engines.values():
        for number, generated in engine.progress():
            tokens[number] = generated
    return Generated(world.now_s, tuple(ended), tuple(tokens))


def after_rollout_s(scenario: Scenario, lengths: Lengths) -> float:
    """Seconds from the last token to the new weights: all GPUs infer, then train, as under `static`, collocated."""
    world = rollout_world(scenario, lengths)
    rollout_s, num_inferred, gpus = 0.0, 0, scenario.cluster.gpus()
    trainer = whole_trainer(scenario)
    for happening in world.happenings():
        if happening.what is What.ROLLOUT_FINISHED:
            rollout_s = world.now_s
            world.release_engines(tuple(world.rollout.engines))
            world.resize_inference(gpus)
        num_inferred += happening.what is What.GROUP_INFERRED
        if happening.what is What.GROUP_INFERRED and num_inferred == len(lengths.turns):
            world.resize_inference(())
            world.resize_trainer(trainer.gpus, trainer.layout)
    return world.now_s - rollout_s


def whole_trainer(scenario: Scenario) -> Placed:
    """As many copies like those of the actor's layout as all GPUs make, at most one a sequence of a minibatch.

    ValueError: not one copy fits.
    """
    own, gpus = scenario.algorithm, scenario.cluster.gpus()
    num_samples = own.prompts_per_iteration // own.n_minibatches * own.group_size
    layout = scenario.placement().layout or Layout()
    placed = most_copies(layout, gpus, most=num_samples, num_shards=scenario.actor_num_logical_shards)
    if placed is None:
        raise ValueError(f"actor_layout {layout} has no copy that fits on {len(gpus)} GPUs: lower tp, pp or cp")
    return placed


def rollout_world(scenario: Scenario, lengths: Lengths, gpus: tuple[GpuId, ...] | None = None) -> World:
    """Every GPU of the cluster is in the rollout, or those of `gpus`. No component has another."""
    cluster = scenario.cluster.gpus()
    gpus, size = cluster if gpus is None else gpus, scenario.costs.engine.gpus_per_engine
    num_minibatches = min(scenario.algorithm.n_minibatches, len(lengths.turns))
    workload = replace(scenario.workload_of(lengths), n_minibatches=num_minibatches)
    placement = Placement(cluster, gpus[: len(gpus) // size * size])
    return World(workload, scenario.costs, placement, (), scenario.model)
