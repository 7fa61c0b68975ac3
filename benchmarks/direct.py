"""A simulated iteration without the scheduler: the world carries out a policy's choice at once, by its own moves.

A search over schedules uses it, and tests compare the scheduler's way with it. The same scenario, policy and seed give
the same run.
"""

from __future__ import annotations

from benchmarks.choice_moves import ChoiceMoves
from services.scheduler.policy import Policy
from services.scheduler.policy.situation import Choice
from services.scheduler.state.remembered import Remembered, as_configured
from simulator import run
from simulator.happenings import What
from simulator.iteration import PROGRESS, DecisionTimes, SimulatedIteration
from simulator.outcome import Run
from simulator.scenario import Scenario
from simulator.watched_policy import WatchedPolicy
from simulator.world import World


class Direct:
    """One run: the policy sees the world, and its choices become moves."""

    def __init__(self, simulated: SimulatedIteration, policy: Policy) -> None:
        self._simulated, self._policy = simulated, WatchedPolicy(policy)
        self._remembered = Remembered()
        self._pace = DecisionTimes(simulated.scenario.scheduler.decide_every_s)
        self._world, self._moves = self._opened()

    def run(self, name: str) -> Run:
        for happening in self._world.happenings():
            self._moves.notice(happening)
            if not self._world.all_reported or happening.what is What.ITERATION_FINISHED:
                continue
            if self._pace.is_due(happening, self._world):
                choice = self._choose(self._world)
                self._moves.accept(choice)
                self._record(choice)
            elif happening.what not in PROGRESS:
                self._moves.carry_on()
        return self._simulated.run_of(self._world, policy=name, decisions=self._policy.decisions)

    def _choose(self, world: World) -> Choice:
        situation = self._simulated.situations.situation(world, self._remembered)
        choice = self._policy.choose(situation)
        self._remembered = choice.remembered(situation)
        return choice

    def _opened(self) -> tuple[World, ChoiceMoves]:
        """The world that begins with the policy's first assignment."""
        spec = self._simulated.spec
        first = self._choose(self._simulated.world(as_configured(spec)))
        world = self._simulated.world(first.assignment)
        moves = ChoiceMoves(world, first.assignment, spec.group_size)
        moves.accept(first)
        self._world = world
        self._record(first)
        return world, moves

    def _record(self, choice: Choice) -> None:
        self._policy.note(self._world.now_s)
        self._pace.record(self._world, choice.ask_at_ms)


def simulate(
    scenario: Scenario, policy: Policy, *, name: str = "", seed: int | None = None, directly: bool = False
) -> Run:
    """As `simulator.run.simulate`. `directly`: run without the scheduler between the policy and the world."""
    if not directly:
        return run.simulate(scenario, policy, name=name, seed=seed)
    simulated = SimulatedIteration(scenario, scenario.seed if seed is None else seed)
    policy.check(simulated.spec)
    return Direct(simulated, policy).run(name or type(policy).__name__)
