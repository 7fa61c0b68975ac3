"""The common part of all simulations of an iteration: its job, its world, and the times of decisions.

A decision is due
- at every structural happening, after all happenings of its instant are reported;
- at any other happening, if `decide_every_s` have passed since the last decision;
- at the time that the last decision asked for.

Invariant: the same scenario, policy and seed give the same history. [test_run: the_same_seed_gives_the_same_run]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import JobSpec
from simulator.bound import clairvoyant_bound
from simulator.cost_model import CostLaws
from simulator.faults import Fault
from simulator.happenings import Happening, What
from simulator.job_spec import job_of, population_law, response_share
from simulator.noise import Noise
from simulator.outcome import PolicyDecision, Run, spans
from simulator.scenario import Scenario
from simulator.situations import Situations, to_ms
from simulator.workload import Workload
from simulator.world import AT_START, Opening, Placement, World

PROGRESS = frozenset({What.SEQUENCE_FINISHED, What.GROUP_FINISHED, What.GROUP_INFERRED})
"""Happenings that are too frequent for a decision at each."""


class DecisionTimes:
    """When a decision is due on the world's happenings. On progress alone it is due at most every `decide_every_s`.

    The scheduler's `pacing` says it of a state's changes.
    """

    def __init__(self, decide_every_s: float, began_s: float = 0.0) -> None:
        self._decide_every_s = decide_every_s
        self._last_s = began_s
        self._wake_ms: int | None = None
        self._num_wakes = 0

    def is_due(self, happening: Happening, world: World) -> bool:
        """Whether a decision is due. `happening` is the last one of its instant."""
        if happening.what in PROGRESS:
            return world.now_s >= self._last_s + self._decide_every_s
        return happening.what is not What.WOKE or happening.number == self._num_wakes

    def record(self, world: World, again_ms: int | None) -> None:
        """Record a decision now. `again_ms`: the time of the next one if nothing happens before."""
        self._last_s = world.now_s
        if again_ms is not None and again_ms != self._wake_ms:
            # Avoid an endless loop: a time in the past would make a decision due again at the same instant.
            self._wake_ms = max(again_ms, to_ms(world.now_s) + 1)
            self._num_wakes += 1
            world.wake_at(self._wake_ms / 1000, self._num_wakes)


class SimulatedIteration:
    """A scenario's iteration under one seed.

    `workload` is its work. None: as the scenario draws it. `spec` is the job that the iteration belongs to. None: a job
    of this iteration alone.
    """

    def __init__(
        self, scenario: Scenario, seed: int, *, workload: Workload | None = None, spec: JobSpec | None = None
    ) -> None:
        self.scenario, self.seed = scenario, seed
        workload = workload or scenario.workload(seed)
        share = response_share(scenario, population_law(scenario.lengths, workload.lengths))
        self.costs: CostLaws = scenario.laws()
        self.spec: JobSpec = spec or job_of(scenario, workload.lengths)
        self.workload: Workload = replace(workload, response_share=share)
        self.situations = Situations(scenario, self.spec, self.workload, self.costs)

    def world(self, at: Assignment, faults: Iterable[Fault] | None = None, opening: Opening = AT_START) -> World:
        """The world that begins with this assignment. `faults` None: those of the scenario, for its first iteration."""
        rollout = tuple(gpu for gpus in at.engines for gpu in gpus)
        trainer, layout = (at.trainer.gpus, at.trainer.layout) if at.trainer else ((), None)
        placement = Placement(self.scenario.cluster.gpus(), rollout, at.inference, trainer, layout)
        own = self.scenario
        strikes = own.scheduled_faults() if faults is None else faults
        noise = Noise(own.noise, self.seed)
        return World(self.workload, self.costs, placement, strikes, own.reshard_model, noise, opening)

    def run_of(self, world: World, *, policy: str, decisions: list[PolicyDecision]) -> Run:
        """The result of an iteration that has ended."""
        size, filtered = self.workload.group_size, self.workload.filtered
        num_trained = sum(group not in filtered for group in world.trainer.trained) * size
        return Run(
            policy=policy,
            seed=self.seed,
            iteration_s=world.now_s - world.began_s,
            timeline={gpu: spans(marks, world.now_s) for gpu, marks in world.gpus.doings.items()},
            decisions=tuple(decisions),
            history=tuple(world.history),
            bound=clairvoyant_bound(self.workload, self.costs, len(world.gpus.cluster)),
            num_moves=len(decisions) - 1,
            num_samples=num_trained,
            num_lost=(self.workload.num_groups - len(world.trainer.trained)) * size,
        )
