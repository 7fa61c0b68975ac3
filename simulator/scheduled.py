"""A simulated iteration under a policy through the scheduler itself, by the same `turn`.

At every instant of a decision the components report their pictures. Turns and their commands then follow one another
until no event and no command is left. This takes no virtual time.

Invariants:
- Every state after an event or a decision passes `check`. [test_simulated_runs: every_sample_is_trained_once]
- The same scenario, policy and seed give the same run. [test_run: the_same_seed_gives_the_same_run]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.scheduler.decide.decision import Decision
from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.turn import checked, turn
from services.scheduler.policy import Policy
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from simulator.cluster import JOB, Cluster
from simulator.happenings import What
from simulator.iteration import DecisionTimes, SimulatedIteration
from simulator.outcome import Run
from simulator.situations import to_ms
from simulator.watched_policy import WatchedPolicy
from simulator.world import Unfinished, World

MAX_TURNS = 10_000
"""The most decisions at one instant. A policy that changes its choice at each would otherwise never end."""


class JobFailed(Unfinished):
    """The scheduler failed the job, or returned it to a checkpoint, which one iteration cannot show."""


def _ignore(*_: object) -> None:
    """The default of `watch` and `record`."""


class Scheduled:
    """One run.

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
        self._pace = DecisionTimes(simulated.scenario.scheduler.decide_every_s)

    def run(self, name: str) -> Run:
        """JobFailed: the scheduler fails the job."""
        self._cluster.boot()
        self._settle(0)
        self._cluster.send_pictures()
        self._settle(0)
        world = self._cluster.begin_iteration()
        self._ask(world)
        for happening in world.happenings():
            self._cluster.notice(happening)
            if not world.all_reported or happening.what is What.ITERATION_FINISHED:
                continue
            if self._cluster.voice.outbox or self._pace.is_due(happening, world):
                self._ask(world)
        return self._result(world, name)

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
            self._cluster.execute(decision.commands)
            if self._state.phase in TERMINAL or self._state.num_restarts:
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
        if not self._state.summaries:
            # The reports were late: they come after the end of the iteration.
            self._cluster.report(world)
            self._settle(to_ms(world.now_s))
        (summary,) = self._state.summaries
        return replace(run, num_samples=summary.trained.num_samples, num_lost=summary.num_lost)
