"""What every way of simulating an iteration shares: its job, its world, and when whoever decides is asked.

Whoever decides is asked at every structural happening, once all that happened at its instant was told; at any other
happening `decide_every_s` after it was asked last; and when it wanted to be.
Invariant: the same scenario, policy and seed give the same instants.
"""

from __future__ import annotations

from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import JobSpec
from simulator.bound import clairvoyant_bound
from simulator.happenings import Happening, What
from simulator.job import job_of
from simulator.outcome import Decided, Run, spans
from simulator.scenario import Scenario
from simulator.views import Seeing, to_ms
from simulator.workload import Workload
from simulator.world import Placement, World

PROGRESS = frozenset({What.SEQUENCE_FINISHED, What.GROUP_FINISHED, What.GROUP_INFERRED})
"""What is told so often that nobody is asked for it at once."""


class Pace:
    """When to ask, on progress at most every `decide_every_s`."""

    def __init__(self, decide_every_s: float) -> None:
        self._decide_every_s = decide_every_s
        self._asked_s = 0.0
        self._wake_ms: int | None = None
        self._num_wakes = 0

    def is_due(self, happening: Happening, world: World) -> bool:
        """`happening` is the last of its instant."""
        if happening.what in PROGRESS:
            return world.now_s >= self._asked_s + self._decide_every_s
        return happening.what is not What.WOKE or happening.number == self._num_wakes

    def asked(self, world: World, again_ms: int | None) -> None:
        """Now; `again_ms`: when it wants to be asked next, should nothing happen before."""
        self._asked_s = world.now_s
        if again_ms is not None and again_ms != self._wake_ms:
            # A time that is past would be asked about again and again at one instant.
            self._wake_ms = max(again_ms, to_ms(world.now_s) + 1)
            self._num_wakes += 1
            world.wake_at(self._wake_ms / 1000, self._num_wakes)


class Simulated:
    """A scenario's iteration under one seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.workload: Workload = scenario.workload(seed)
        self.spec: JobSpec = job_of(scenario, self.workload.lengths)
        self.seeing = Seeing(scenario, self.spec, self.workload)

    def world(self, at: Assignment) -> World:
        """That begins there."""
        rollout = tuple(gpu for gpus in at.engines for gpu in gpus)
        trainer, layout = (at.trainer.gpus, at.trainer.layout) if at.trainer else ((), None)
        placement = Placement(self.scenario.cluster.gpus(), rollout, at.inference, trainer, layout)
        own = self.scenario
        return World(self.workload, own.costs, placement, own.scheduled_faults(), own.model)

    def run_of(self, world: World, *, policy: str, decisions: list[Decided]) -> Run:
        """Of an iteration that is over."""
        size = self.workload.group_size
        num_trained = len(world.trainer.trained) * size
        return Run(
            policy=policy,
            seed=self.seed,
            iteration_s=world.now_s,
            timeline={gpu: spans(marks, world.now_s) for gpu, marks in world.gpus.doings.items()},
            decisions=tuple(decisions),
            history=tuple(world.history),
            bound=clairvoyant_bound(self.workload, self.scenario.costs, len(world.gpus.cluster)),
            num_moves=len(decisions) - 1,
            num_samples=num_trained,
            num_lost=self.workload.num_groups * size - num_trained,
        )
