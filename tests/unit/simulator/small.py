"""Small worlds for tests: two GPUs an engine, four running sequences an engine, and the default times of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.state.observed import Inferring
from simulator.cost_model import Costs, EngineCosts, SwitchCosts, SyncCosts, TrainerCosts
from simulator.faults import Fault
from simulator.gpus import Holder
from simulator.lengths import Lengths, Turns
from simulator.model import ModelSection
from simulator.situations import inferring
from simulator.workload import Workload
from simulator.world import Placement, World
from tidegate.types import GpuId, Layout, MinibatchOrder

CLUSTER = tuple(GpuId(f"n0/{index}") for index in range(8))
COSTS = Costs(engine=EngineCosts(max_running=4, kv_capacity_tokens=2_000))
FREE_MOVES = Costs(
    engine=EngineCosts(gpus_per_engine=1, max_running=4),
    trainer=TrainerCosts(fixed_s=0.5, rate_tokens_per_s=2_000, rate_gpus=4, exponent=0.5),
    switch=SwitchCosts(
        release_s=0, acquire_s=0, resubmit_s=0, reshard_s=0, trainer_warm_s=0, inference_warm_s=0, detect_s=0
    ),
    sync=SyncCosts(fixed_s=0),
)


def workload(
    turns: Sequence[Sequence[Turns]],
    *,
    order: MinibatchOrder = MinibatchOrder.ARRIVAL,
    streams: bool = True,
    carries: bool = False,
    scores_ahead: bool = False,
) -> Workload:
    """Two minibatches. A second turn begins a second after the first, with five more tokens from the environment."""
    lengths = Lengths(tuple(map(tuple, turns)), tuple(1.0 for _ in turns))
    return Workload(
        lengths=lengths,
        n_minibatches=2,
        prompt_tokens=10,
        minibatch_order=order,
        streams=streams,
        carries_gradients=carries,
        scores_ahead=scores_ahead,
        observation_tokens=5,
        environment_s=1.0,
    )


def world(
    work: Workload,
    *,
    faults: Sequence[Fault] = (),
    actor: int = 2,
    inference: int = 2,
    model: ModelSection | None = None,
    costs: Costs = COSTS,
) -> World:
    """The actor has the first GPUs, the inference the next ones, and the rollout the others."""
    others = actor + inference
    layout = Layout(dp=actor) if actor else None
    placement = Placement(CLUSTER, CLUSTER[others:], CLUSTER[actor:others], CLUSTER[:actor], layout)
    return World(work, costs, placement, faults, model)


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of a world at one instant that policies and the scheduler read."""

    lengths: tuple[int, ...]
    places: tuple[int, ...]
    """The place of each sequence. That of a running one is its engine's position in `engines`."""
    queue: tuple[int, ...]
    engines: tuple[tuple[GpuId, ...], ...]
    kv_tokens: tuple[int, ...]
    inferring: Inferring
    inference: tuple[GpuId, ...]
    trainer: tuple[tuple[GpuId, ...], Layout | None, int, float | None]
    holders: Mapping[GpuId, Holder]

    def running(self, engine: int) -> list[int]:
        return [number for number, place in enumerate(self.places) if place == engine]

    def held_by(self, holder: Holder) -> tuple[GpuId, ...]:
        return tuple(gpu for gpu, held in self.holders.items() if held is holder)


def shown(over: World) -> Shown:
    """The present state, with all engines advanced to now."""
    rollout, trainer = over.rollout, over.trainer
    rollout.advance()
    lengths, places = rollout.columns.snapshot({name: engine.steps for name, engine in rollout.engines.items()})
    return Shown(
        lengths=tuple(lengths.tolist()),
        places=tuple(places.tolist()),
        queue=tuple(sequence.index for sequence in rollout.waiting),
        engines=tuple(engine.gpus for engine in rollout.engines.values()),
        kv_tokens=tuple(engine.kv_tokens for engine in rollout.engines.values()),
        inferring=inferring(over),
        inference=over.inference.gpus,
        trainer=(trainer.gpus, trainer.layout, trainer.minibatch, trainer.closes_at_s),
        holders={gpu: over.gpus.holder(gpu) for gpu in over.gpus.cluster},
    )
