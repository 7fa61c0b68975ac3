"""A simulated iteration at one instant as a policy sees it.

It shows what the components of a real job would tell, what this iteration has measured so far among it, and what
earlier ones would have told of the rest; no length of a response that has not ended. What is measured is exact: the
trainer's rate in a layout once it has trained in it, what of a minibatch no GPU makes shorter with the first minibatch,
and inference's rate with the first group. GPUs on their way, or promised to who cannot take them yet, are `moving`.
Invariant: looking changes nothing but how far the engines were advanced.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.policy.situation import Inference, Situation, Trainer
from services.scheduler.state.observed import CUT, ENDED, Engine, Generation, Inferring, Training
from services.scheduler.state.remembered import Remembered
from services.scheduler.state.values import JobSpec, Placed
from simulator.engines import Engine as SimulatedEngine
from simulator.gpus import Holder
from simulator.job import measured_rate
from simulator.scenario import Scenario
from simulator.workload import Workload
from simulator.world import World
from tidegate.types import GpuId


class Seeing:
    """Of one job's iterations: what stays the same in all its situations is made once."""

    def __init__(self, scenario: Scenario, spec: JobSpec, workload: Workload) -> None:
        self._spec, self._costs = spec, scenario.costs
        self._hints = workload.lengths.hints
        self._max_tokens = scenario.lengths.max_tokens

    def situation(self, world: World, remembered: Remembered) -> Situation:
        world.rollout.advance()
        told = inferring(world)
        return Situation(
            now_ms=to_ms(world.now_s),
            incarnation=0,
            iteration=0,
            spec=self._spec,
            generation=self.generation(world),
            inference=Inference(world.inference.gpus, told.rate_tokens_per_s_per_gpu, told),
            trainer=Trainer(_placed(world), self.training(world)),
            free=tuple(gpu for gpu in world.gpus.held_by(Holder.FREE) if gpu not in world.promised()),
            moving=_moving(world),
            costs=self._spec.costs,
            lengths=self._spec.lengths,
            remembered=remembered,
        )

    def generation(self, world: World) -> Generation:
        """The caller has advanced the engines."""
        rollout = world.rollout
        lengths, places = rollout.columns.seen({name: engine.steps for name, engine in rollout.engines.items()})
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
        rates = (measured_rate(self._spec, self._costs, layout) for layout in trainer.trained_in)
        return Training(
            num_minibatches_done=trainer.minibatch,
            num_taken=len(trainer.trained) + len(trainer.taken),
            is_at_boundary=trainer.is_at_boundary,
            closes_at_ms=None if trainer.closes_at_s is None else to_ms(trainer.closes_at_s),
            measured=tuple(rates),
            update_s=self._costs.trainer.fixed_s if trainer.minibatch else None,
        )


def to_ms(at_s: float) -> int:
    """Rounded, so that who asked to be woken at a millisecond sees that one."""
    return round(at_s * 1000)


def inferring(world: World) -> Inferring:
    trainer = world.trainer
    ready = (*trainer.trained, *(group for group, _ in trainer.taken), *(group for group, _ in trainer.ready))
    rate = world.costs.inference.rate_tokens_per_s if world.inference.has_computed else None
    return Inferring(ready, world.inference.is_busy, rate)


def _engine(engine: SimulatedEngine) -> Engine:
    running, costs = engine.running, engine.costs
    step_s = costs.decode_s(running=running, kv_tokens=engine.kv_tokens, steps=1)
    return Engine(
        gpus=engine.gpus,
        num_running=running,
        num_waiting=0,
        num_kv_tokens=engine.kv_tokens,
        kv_capacity_tokens=costs.kv_capacity_tokens,
        max_running=costs.max_running,
        rate_tokens_per_s=running / step_s,
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
