"""Faults that strike the components of one iteration: what is lost, since when, and when it is back.

Order at a loss:
1. The happening of the loss.
2. The holder of the GPU lets go of the work on it: an engine or the trainer.
3. The inference and a waiting resize of the trainer go on without the GPU.

Invariants:
- A fault strikes once in a job, and an outage lasts as long, whatever iterations pass meanwhile.
  [test_job_run: a_fault_strikes_once]
- A GPU with several outages is available again after the last one. [test_world: free_again_after_the_last_of_its_own]
- A node that is lost already is not lost again: its services would come back twice.
  [test_world: a_node_that_is_lost_already]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from simulator.cost_model import CostLaws
from simulator.faults import EngineFault, Fault, GpuFault, LateFault, NodeFault, Outage
from simulator.gpus import Holder
from simulator.happenings import Happening, Shared, What
from simulator.inference import Inference
from simulator.rollout import Rollout
from simulator.training import Trainer
from tidegate.types import GpuId, node_of


@dataclass(frozen=True, slots=True)
class Stages:
    rollout: Rollout
    inference: Inference
    trainer: Trainer


class Striking:
    """`faults` have times of the job. A fault whose time is over strikes at once.

    `report` gets each happening whose report a fault has delayed.
    """

    def __init__(
        self, faults: Iterable[Fault], costs: CostLaws, shared: Shared, report: Callable[[Happening], None]
    ) -> None:
        self._costs, self._shared, self._report = costs, shared, report
        self._to_strike = list(faults)
        self._late: list[LateFault] = []
        self.outages: list[Outage] = []
        """The present ones, in the order of their beginnings."""
        self._lost_by: dict[GpuId, list[Outage]] = {}

    @property
    def pending(self) -> tuple[Fault, ...]:
        """The faults that have had no effect yet."""
        return (*self._late, *self._to_strike)

    def go_on(self, outages: Iterable[Outage]) -> None:
        """Outages that began in an earlier iteration. Every component knows of them."""
        for outage in outages:
            self.outages.append(outage)
            for gpu in outage.gpus:
                self._lost_by.setdefault(gpu, []).append(outage)
                self._shared.gpus.lose(gpu, self._now)
            self._schedule_end(outage)

    def strike_on(self, stages: Stages) -> None:
        """From now on faults strike these components."""
        for fault in self._to_strike:
            self._shared.clock.schedule(fault.at_s, partial(self._fail, fault, stages))

    def delays(self, happening: Happening) -> bool:
        """Whether a fault makes the report of the happening late."""
        fault = next((each for each in self._late if each.what is happening.what), None)
        if fault is None:
            return False
        self._late.remove(fault)
        reported_s = self._now + fault.late_s
        self._shared.clock.schedule(reported_s, partial(self._report, replace(happening, reported_s=reported_s)))
        return True

    @property
    def _now(self) -> float:
        return self._shared.clock.now_s

    def _fail(self, fault: Fault, stages: Stages) -> None:
        self._to_strike.remove(fault)
        match fault:
            case LateFault():
                self._late.append(fault)
            case GpuFault(gpu=gpu):
                self._begin(Outage((gpu,), self._after(fault.back_after_s)), stages)
            case NodeFault():
                self._lose_node(fault, stages)
            case EngineFault(engine=name):
                if name in stages.rollout.engines:
                    self._free_after_death(stages.rollout.kill(name), stages)
                else:
                    self._shared.report(What.FAULT_MISSED, name, len(stages.rollout.engines))

    def _lose_node(self, fault: NodeFault, stages: Stages) -> None:
        gpus = tuple(gpu for gpu in self._shared.gpus.cluster if node_of(gpu) == fault.node)
        if any(outage.node == fault.node for outage in self.outages):
            self._shared.report(What.FAULT_MISSED, gpus=gpus)
            return
        self._shared.report(What.NODE_LOST, gpus=gpus)
        self._begin(Outage(gpus, self._after(fault.back_after_s), fault.node), stages)

    def _begin(self, outage: Outage, stages: Stages) -> None:
        self.outages.append(outage)
        for gpu in outage.gpus:
            self._lose(gpu, outage, stages)
        self._schedule_end(outage)

    def _lose(self, gpu: GpuId, outage: Outage, stages: Stages) -> None:
        self._lost_by.setdefault(gpu, []).append(outage)
        before = self._shared.gpus.lose(gpu, self._now)
        if before is Holder.LOST:
            return
        self._shared.report(What.GPU_LOST, gpus=(gpu,))
        match before:
            case Holder.ROLLOUT:
                name = stages.rollout.engine_on(gpu)
                others = stages.rollout.forget_start(gpu) if name is None else stages.rollout.kill(name)
                self._free_after_death(tuple(other for other in others if other != gpu), stages)
            case Holder.ACTOR:
                stages.trainer.lose(gpu, self._shared.gpus.held_by(Holder.ACTOR))
        stages.inference.lose(gpu)
        stages.trainer.drop_waiting(gpu)

    def _free_after_death(self, gpus: tuple[GpuId, ...], stages: Stages) -> None:
        self._shared.gpus.move(gpus, Holder.ROLLOUT, Holder.LEAVING, self._now)
        self._shared.clock.schedule(self._now + self._costs.switch.detect_s, partial(stages.rollout.free, gpus))

    def _after(self, seconds: float | None) -> float | None:
        return None if seconds is None else self._now + seconds

    def _schedule_end(self, outage: Outage) -> None:
        if outage.back_at_s is not None:
            self._shared.clock.schedule(outage.back_at_s, partial(self._end, outage))

    def _end(self, outage: Outage) -> None:
        self.outages.remove(outage)
        if outage.node is not None:
            self._shared.report(What.NODE_BACK, gpus=outage.gpus)
        for gpu in outage.gpus:
            self._come_back(gpu, outage)

    def _come_back(self, gpu: GpuId, outage: Outage) -> None:
        """Free the GPU, unless another outage still holds it lost."""
        self._lost_by[gpu].remove(outage)
        if not self._lost_by[gpu]:
            self._shared.gpus.move([gpu], Holder.LOST, Holder.FREE, self._now)
            self._shared.report(What.GPUS_FREED, gpus=(gpu,))
            self._shared.freed()
