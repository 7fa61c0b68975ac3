"""The policy's view of a simulated iteration at one instant: a `Situation`.

A situation has the reports that the components of a real job would have made. It has this iteration's measurements, and
those of earlier iterations for the rest. It never has the length of an unfinished response. Measurements are exact:
- the trainer's rate in a layout, after training in it, in response tokens as that of the inference;
- the fixed part of a minibatch, after the first minibatch;
- the rate of inference, after the first group.
GPUs that change their holder, and GPUs promised to a component that cannot take them yet, are `moving`.

Making a situation changes nothing, except that it advances the engines to the present time.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.policy.situation import Inference, Situation, Trainer
from services.scheduler.state.observed import CUT, ENDED, Engine, Generation, Inferring, TrainerRate, Training
from services.scheduler.state.remembered import Remembered
from services.scheduler.state.values import JobSpec, Placed
from simulator.cost_model import CostLaws
from simulator.engines import Engine as SimulatedEngine
from simulator.gpus import Holder
from simulator.scenario import Scenario
from simulator.workload import Workload
from simulator.world import World
from tidegate.types import GpuId


class Situations:
    """Makes the situations of one iteration. The constant parts are made once."""

    def __init__(self, scenario: Scenario, spec: JobSpec, workload: Workload, costs: CostLaws) -> None:
        self._spec, self._costs = spec, costs
        self._hints = workload.lengths.hints
        self._max_tokens = scenario.lengths.max_tokens

    def situation(self, world: World, remembered: Remembered) -> Situation:
        world.rollout.advance()
        report = inferring(world)
        return Situation(
            now_ms=to_ms(world.now_s),
            incarnation=0,
            iteration=0,
            spec=self._spec,
            generation=self.generation(world),
            inference=Inference(world.inference.gpus, report.rate_tokens_per_s_per_gpu, report),
            trainer=Trainer(_placed(world), self.training(world)),
            free=tuple(gpu for gpu in world.gpus.held_by(Holder.FREE) if gpu not in world.promised()),
            moving=_moving(world),
            costs=self._spec.costs,
            lengths=self._spec.lengths,
            remembered=remembered,
        )

    def generation(self, world: World) -> Generation:
        """The rollout's part. The caller has advanced the engines."""
        rollout = world.rollout
        lengths, places = rollout.columns.snapshot({name: engine.steps for name, engine in rollout.engines.items()})
        places = np.where((places == ENDED) & (lengths >= self._max_tokens), CUT, places)
        return Generation(
            engines=tuple(_engine(engine) for engine in rollout.engines.values()),
            group_size=self._spec.group_size,
            lengths=tuple(lengths.tolist()),
            places=tuple(places.tolist()),
            queue=tuple(sequence.index for sequence in rollout.waiting),
            hints=self._hints,
        )

    def training(self, world: World) -> Training:
        trainer = world.trainer
        return Training(
            num_minibatches_done=trainer.minibatch,
            num_taken=len(trainer.trained) + len(trainer.taken),
            is_at_boundary=trainer.is_at_boundary,
            closes_at_ms=None if trainer.closes_at_s is None else to_ms(trainer.closes_at_s),
            measured=self._rates(world),
            update_s=trainer.measured_update_s,
        )

    def _rates(self, world: World) -> tuple[TrainerRate, ...]:
        """By layout, with the waits of replicas for the busiest one. None for a layout with filtered groups only."""
        share, tokens_s = world.workload.response_share, self._costs.trainer.tokens_s
        return tuple(
            TrainerRate(layout, share / tokens_s(1.0, layout) / (measured.seconds / measured.even_s))
            for layout, measured in world.trainer.trained_in.items()
            if measured.even_s
        )


def to_ms(at_s: float) -> int:
    """The time rounded to milliseconds, so that a wake-up at a millisecond sees this very millisecond."""
    return round(at_s * 1000)


def inferring(world: World) -> Inferring:
    trainer = world.trainer
    ready = (*trainer.trained, *(group for group, _ in trainer.taken), *(group for group, _ in trainer.ready))
    share, inference = world.workload.response_share, world.inference
    rate = world.costs.inference.rate_tokens_per_s * share if inference.has_computed else None
    return Inferring(ready, inference.is_busy, rate, num_tokens_ahead=round(inference.num_tokens_ahead * share))


def _engine(engine: SimulatedEngine) -> Engine:
    running, costs = engine.running, engine.costs
    return Engine(
        gpus=engine.gpus,
        num_running=running,
        num_waiting=0,
        num_kv_tokens=engine.kv_tokens,
        kv_capacity_tokens=costs.kv_capacity_tokens,
        max_running=costs.max_running,
        rate_tokens_per_s=running / engine.decode_s(1),
    )


def _placed(world: World) -> Placed | None:
    trainer = world.trainer
    return Placed(trainer.gpus, trainer.layout) if trainer.layout else None


def _moving(world: World) -> tuple[GpuId, ...]:
    at_work = {gpu for engine in world.rollout.engines.values() for gpu in engine.gpus}
    at_work.update(world.inference.gpus, world.trainer.gpus)
    promised = world.promised()

    def moves(gpu: GpuId) -> bool:
        holder = world.gpus.holder(gpu)
        if holder is Holder.FREE:
            return gpu in promised
        return holder is not Holder.LOST and gpu not in at_work

    return tuple(gpu for gpu in world.gpus.cluster if moves(gpu))
