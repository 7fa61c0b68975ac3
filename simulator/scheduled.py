"""Simulated iterations under a policy through the scheduler itself, by the same `turn`.

At every instant of a decision the components report their pictures. Turns and their commands then follow one another
until no event and no command is left. This takes no virtual time.

A job of several iterations has one state and one clock. Between two of them
1. the actor publishes its weights and the readers load them, which the sync of the iteration includes,
2. the scheduler opens the next iteration. Where a component waits for lost GPUs, time passes until it has some,
3. the policy chooses the first assignment, and the components take it without further time.

A job whose actor lost its state goes back to its checkpoint, which each iteration leaves: the iteration begins again
once the actor has started cold. A run of one iteration ends with the scheduler's message instead.

Invariants:
- Every state after an event or a decision passes `check`. [test_simulated_runs: every_sample_is_trained_once]
- The same scenario, policy and seed give the same run. [test_run: the_same_seed_gives_the_same_run]
- An iteration begins where the one before it ended, or later. [test_job_run: seconds_add_up]
- An iteration that begins again trains each of its samples once. [test_job_run: goes_back_to_its_checkpoint]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from services.scheduler.decide.decision import Decision
from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.turn import checked, turn
from services.scheduler.policy import Policy
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from services.scheduler.state.learned import Learned
from simulator.cluster import JOB, Cluster
from simulator.faults import Fault, next_return_s
from simulator.happenings import What
from simulator.iteration import DecisionTimes, SimulatedIteration
from simulator.job_iterations import SimulatedJob
from simulator.outcome import Run
from simulator.situations import to_ms
from simulator.watched_policy import WatchedPolicy
from simulator.world import Unfinished, World
from tidegate.types import Role

MAX_TURNS = 10_000
"""The most decisions at one instant. A policy that changes its choice at each would otherwise never end."""


class JobFailed(Unfinished):
    """The scheduler failed the job, or returned a run of one iteration to a checkpoint."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An iteration that is over. `learned` is what the scheduler knows after it.

    `abandoned` has the earlier attempts, up to the loss of the actor's state."""

    simulated: SimulatedIteration
    run: Run
    learned: Learned
    abandoned: tuple[Run, ...] = ()


def _ignore(*_: object) -> None:
    """The default of `watch` and `record`."""


class Scheduled:
    """One job, whose first iteration is `simulated`.

    `watch` gets every state before a decision, with the time in ms. `record` gets each event and each decision with its
    time in ms.
    """

    def __init__(
        self,
        simulated: SimulatedIteration,
        policy: Policy,
        *,
        watch: Callable[[ClusterState, int], object] = _ignore,
        record: Callable[[tuple[ev.Event | None, int, Decision | None]], object] = _ignore,
    ) -> None:
        self._watch, self._record = watch, record
        self._simulated = simulated
        self._policy = WatchedPolicy(policy)
        self._cluster = Cluster(simulated)
        self._state = ClusterState(job=JOB)
        self._may_restart, self._num_restarts = False, 0
        self._pace = DecisionTimes(simulated.scenario.scheduler.decide_every_s)

    def run(self, name: str) -> Run:
        """The first iteration. JobFailed: the scheduler fails the job."""
        world = self._first_world()
        self._go_through(world)
        return self._result(world, name)

    def run_job(self, job: SimulatedJob, name: str) -> Iterator[Finished]:
        """Every iteration of the job. JobFailed as `run`."""
        self._may_restart = True
        world = self._first_world()
        for number in range(job.num_iterations):
            abandoned: list[Run] = []
            while not self._go_through(world):
                abandoned.append(self._simulated.run_of(world, policy=name, decisions=self._policy.decisions))
                world = self._world_again(world, number)
            yield Finished(self._simulated, self._result(world, name), self._state.learned, tuple(abandoned))
            if number + 1 < job.num_iterations:
                world = self._following_world(world, job, number + 1)

    def _first_world(self) -> World:
        self._cluster.boot()
        self._settle(0)
        return self._begin(self._simulated.scenario.scheduled_faults(), at_s=0.0)

    def _following_world(self, world: World, job: SimulatedJob, number: int) -> World:
        self._simulated = job.iteration(number)
        self._policy.begin()
        self._cluster.end_iteration(self._simulated)
        at_s = self._opened_s(world.now_s, number)
        self._pace = DecisionTimes(self._simulated.scenario.scheduler.decide_every_s, at_s)
        return self._begin((*world.pending_faults, *job.new_faults(number, began_s=at_s)), at_s=at_s)

    def _world_again(self, world: World, number: int) -> World:
        """The world of an iteration whose first attempt ended with `world`."""
        self._policy.begin()
        at_s = self._opened_s(world.now_s, number) + self._simulated.scenario.costs.switch.trainer_cold_s
        self._cluster.take_back(at_s)
        self._pace = DecisionTimes(self._simulated.scenario.scheduler.decide_every_s, at_s)
        return self._begin(world.pending_faults, at_s=at_s)

    def _opened_s(self, at_s: float, number: int) -> float:
        """When the scheduler has opened the iteration, from `at_s` on."""
        while True:
            self._settle(to_ms(at_s))
            iteration = self._state.iteration
            if iteration is not None and iteration.plan.iteration == number and len(iteration.opened) == len(Role):
                return at_s
            due_ms, return_s = next_due_ms(self._state), next_return_s(self._cluster.outages)
            next_s = min(math.inf if due_ms is None else due_ms / 1000, math.inf if return_s is None else return_s)
            if next_s == math.inf:
                raise JobFailed(f"after {at_s:g} s nothing is due and iteration {number} is not open")
            # Avoid an endless loop: a time that is due already would never pass.
            at_s = max(next_s, at_s + 0.001)
            self._cluster.take_back(at_s)

    def _begin(self, faults: Iterable[Fault], *, at_s: float) -> World:
        """The world that begins with the policy's first assignment."""
        self._cluster.send_pictures()
        self._settle(to_ms(at_s))
        world = self._cluster.begin_iteration(faults, at_s=at_s)
        self._ask(world)
        return world

    def _go_through(self, world: World) -> bool:
        """Whether the iteration has ended. Otherwise it begins again."""
        for happening in world.happenings():
            self._cluster.notice(happening)
            if not world.all_reported or happening.what is What.ITERATION_FINISHED:
                continue
            if self._cluster.voice.outbox or self._pace.is_due(happening, world):
                self._ask(world)
            if self._cluster.world is not world:
                return False
        return True

    def _ask(self, world: World) -> None:
        if self._state.iteration is not None:
            self._cluster.send_pictures()
        self._settle(to_ms(world.now_s))
        due_ms = next_due_ms(self._state)
        self._pace.record(world, due_ms)

    def _settle(self, now_ms: int) -> None:
        for _ in range(MAX_TURNS):
            events = self._events()
            made = turn(self._state, now_ms, self._policy, events=events)
            decision = made.decided
            for event in events:
                self._record((event, now_ms, None))
            self._watch(made.folded, now_ms)
            self._record((None, now_ms, decision))
            self._state = checked(*made.states)
            self._policy.note(now_ms / 1000)
            self._cluster.store.saved_version = self._state.version
            if self._may_restart and self._state.num_restarts > self._num_restarts:
                # The commands are those of the new incarnation.
                self._num_restarts = self._state.num_restarts
                self._cluster.restart_actor(self._state.incarnation)
            self._cluster.execute(decision.commands)
            if self._state.phase in TERMINAL or self._state.num_restarts > self._num_restarts:
                raise JobFailed(f"after {now_ms / 1000:g} s the job is {self._state.phase}: {self._state.message}")
            if not decision.commands and not self._cluster.voice.outbox:
                return
        raise JobFailed(f"after {now_ms / 1000:g} s {MAX_TURNS} decisions came to no end: {decision.reason}")

    def _events(self) -> list[ev.Event]:
        """The events of components since the last turn, and the store's contents if they are new."""
        events = list(self._cluster.voice.outbox)
        self._cluster.voice.outbox.clear()
        if (observed := self._cluster.store.changed()) is not None:
            events.append(ev.Event(job=JOB, source="scheduler", boot=1, sequence=0, body=observed))
        return events

    def _result(self, world: World, name: str) -> Run:
        """The result, with the trained and lost samples of the scheduler's accounts, by the samples' ids."""
        run = self._simulated.run_of(world, policy=name, decisions=self._policy.decisions)
        number = self._cluster.voice.iteration
        if not any(each.iteration == number and not each.is_superseded for each in self._state.summaries):
            # The reports were late: they come after the end of the iteration.
            self._cluster.report(world)
            self._settle(to_ms(world.now_s))
        summary = self._state.summaries[-1]
        assert summary.iteration == number, f"iteration {number} has ended without its accounts"
        return replace(run, num_samples=summary.trained.num_samples, num_lost=summary.num_lost)
