"""One simulated iteration under a policy: who is asked when, and what came of it.

The iteration begins where the policy first places it: components wake up for it while the weights are taken, and that
time is in the cost of the sync, the same for all. From then on the policy is asked at every structural happening, once
all that happened at its instant was told; at any other happening `decide_every_s` after it was asked last; and when it
wanted to be.
Invariants: the same scenario, policy and seed give the same run; a GPU's spans follow one another from 0 to the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.remembered import Assignment, Remembered
from simulator.bound import Bound, clairvoyant_bound
from simulator.carrying import Carrying
from simulator.gpus import Doing
from simulator.happenings import Happening, What
from simulator.job import job_of
from simulator.scenario import Scenario
from simulator.seeing import Seeing, to_ms
from simulator.world import Placement, World
from tidegate.types import GpuId

DECIDE_EVERY_S = 1.0

PROGRESS = frozenset({What.SEQUENCE_FINISHED, What.GROUP_FINISHED, What.GROUP_INFERRED})
"""What is told so often that nobody is asked for it at once."""


class Chooses(Protocol):
    """A policy: pure, the same situation gives the same choice."""

    def choose(self, situation: Situation) -> Choice: ...


@dataclass(frozen=True, slots=True)
class GpuSpan:
    start_s: float
    end_s: float
    state: Doing


@dataclass(frozen=True, slots=True)
class Decided:
    """A choice that changed the assignment. `predicted_end_s` is the iteration's end as the policy foresaw it, None
    where it foresees none."""

    at_s: float
    reason: str
    assignment: Assignment
    predicted_end_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """`num_samples` are those that optimizer steps trained, `num_lost` those that were to be and were not."""

    policy: str
    seed: int
    iteration_s: float
    timeline: Mapping[GpuId, tuple[GpuSpan, ...]]
    decisions: tuple[Decided, ...]
    history: tuple[Happening, ...]
    bound: Bound
    num_moves: int
    num_samples: int
    num_lost: int


def simulate(scenario: Scenario, policy: Chooses, *, name: str = "", seed: int | None = None) -> Run:
    """ScenarioError for a placement without a home for each component, Stalled where the policy leaves work without
    GPUs for ever."""
    return _Simulated(scenario, policy, scenario.seed if seed is None else seed).run(name or type(policy).__name__)


class _Simulated:
    """One run while it goes on."""

    def __init__(self, scenario: Scenario, policy: Chooses, seed: int) -> None:
        self._scenario, self._policy, self._seed = scenario, policy, seed
        self._spec = job_of(scenario)
        self._workload = scenario.workload(seed)
        self._seeing = Seeing(scenario, self._spec, self._workload)
        self._remembered = Remembered()
        self._decisions: list[Decided] = []
        self._asked_s = 0.0
        self._wake_ms: int | None = None
        self._num_wakes = 0
        self._world, self._carrying = self._opened()

    def run(self, name: str) -> Run:
        for happening in self._world.happenings():
            self._carrying.notice(happening)
            if not self._world.is_told or happening.what is What.ITERATION_FINISHED:
                continue
            if self._is_due(happening):
                self._ask(self._world)
            elif happening.what not in PROGRESS:
                self._carrying.carry_on()
        return self._told(name)

    def _opened(self) -> tuple[World, Carrying]:
        """A world that begins where the policy wants it."""
        home = self._scenario.placement()
        first = self._policy.choose(self._seeing.situation(self._made(home), self._remembered))
        at = first.assignment
        rollout = tuple(gpu for gpus in at.engines for gpu in gpus)
        trainer, layout = (at.trainer.gpus, at.trainer.layout) if at.trainer else ((), None)
        world = self._made(Placement(home.cluster, rollout, at.inference, trainer, layout))
        carrying = Carrying(world, at, self._spec.group_size)
        carrying.accept(first)
        self._took(world, first, is_new=True)
        return world, carrying

    def _made(self, placement: Placement) -> World:
        return World(self._workload, self._scenario.costs, placement, self._scenario.scheduled_faults())

    def _is_due(self, happening: Happening) -> bool:
        if happening.what in PROGRESS:
            return self._world.now_s >= self._asked_s + DECIDE_EVERY_S
        return happening.what is not What.WOKE or happening.number == self._num_wakes

    def _ask(self, world: World) -> None:
        choice = self._policy.choose(self._seeing.situation(world, self._remembered))
        self._took(world, choice, is_new=self._carrying.accept(choice))

    def _took(self, world: World, choice: Choice, *, is_new: bool) -> None:
        self._remembered, self._asked_s = choice.remembered, world.now_s
        if is_new:
            self._decisions.append(Decided(world.now_s, choice.reason, choice.assignment, None))
        if choice.ask_at_ms is not None and choice.ask_at_ms != self._wake_ms:
            # A time that is past would be asked about again and again at one instant.
            self._wake_ms = max(choice.ask_at_ms, to_ms(world.now_s) + 1)
            self._num_wakes += 1
            world.wake_at(self._wake_ms / 1000, self._num_wakes)

    def _told(self, name: str) -> Run:
        world, size = self._world, self._workload.group_size
        num_trained = len(world.trainer.trained) * size
        return Run(
            policy=name,
            seed=self._seed,
            iteration_s=world.now_s,
            timeline={gpu: _spans(marks, world.now_s) for gpu, marks in world.gpus.doings.items()},
            decisions=tuple(self._decisions),
            history=tuple(world.history),
            bound=clairvoyant_bound(self._workload, self._scenario.costs, len(world.gpus.cluster)),
            num_moves=self._carrying.num_moves,
            num_samples=num_trained,
            num_lost=self._workload.num_groups * size - num_trained,
        )


def _spans(marks: list[tuple[float, Doing]], end_s: float) -> tuple[GpuSpan, ...]:
    """What took no time is left out, and what goes on is one span."""
    spans: list[GpuSpan] = []
    for (start_s, doing), until_s in zip(marks, [at_s for at_s, _ in marks[1:]] + [end_s], strict=True):
        if until_s <= start_s:
            continue
        if spans and spans[-1].state is doing:
            spans[-1] = replace(spans[-1], end_s=until_s)
        else:
            spans.append(GpuSpan(start_s, until_s, doing))
    return tuple(spans)
