"""A simulated iteration under a policy through the scheduler itself, by the same `turn`.

At every instant at which a policy is asked, the components report what they see. Turns and the commands that come of
them then follow one another until no event and no command is left. That takes no time.

Invariants: every state that follows from an event or a decision passes `check`; the same scenario, policy and seed give
the same events, commands and happenings, byte for byte.
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
from simulator.iteration import Pace, SimulatedIteration
from simulator.outcome import Run
from simulator.situations import to_ms
from simulator.watched_policy import WatchedPolicy
from simulator.world import Unfinished, World

MAX_TURNS = 10_000
"""Decisions at one instant: a policy that changes its mind at each would go on for ever."""


class JobFailed(Unfinished):
    """The scheduler gave the job up, or went back to a checkpoint, which one iteration does not show."""


def _forgotten(*_: object) -> None:
    """Nobody looks, nobody keeps it."""


class Scheduled:
    """One run while it goes on. `watch` is shown every state that is decided on, and when; `record` each event and
    each decision, with its milliseconds."""

    def __init__(
        self,
        simulated: SimulatedIteration,
        policy: Policy,
        *,
        watch: Callable[[ClusterState, int], object] = _forgotten,
        record: Callable[[tuple[ev.Event | None, int, Decision | None]], object] = _forgotten,
    ) -> None:
        self._watch, self._record = watch, record
        self._simulated = simulated
        self._policy = WatchedPolicy(policy)
        self._cluster = Cluster(simulated)
        self._state = ClusterState(job=JOB)
        self._pace = Pace(simulated.scenario.scheduler.decide_every_s)

    def run(self, name: str) -> Run:
        """JobFailed where the scheduler gives up."""
        self._cluster.boot()
        self._settle(0)
        self._cluster.tell_pictures()
        self._settle(0)
        world = self._cluster.begin_iteration()
        self._ask(world)
        for happening in world.happenings():
            self._cluster.notice(happening)
            if not world.all_reported or happening.what is What.ITERATION_FINISHED:
                continue
            if self._cluster.voice.outbox or self._pace.is_due(happening, world):
                self._ask(world)
        return self._told(world, name)

    def _ask(self, world: World) -> None:
        if self._state.iteration is not None:
            self._cluster.tell_pictures()
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
        """What components said since the last turn, and what the store says where that is new."""
        events = list(self._cluster.voice.outbox)
        self._cluster.voice.outbox.clear()
        if (observed := self._cluster.store.changed()) is not None:
            events.append(ev.Event(job=JOB, source="scheduler", boot=1, sequence=0, body=observed))
        return events

    def _told(self, world: World, name: str) -> Run:
        """What was trained and lost is what the scheduler's accounts say, by the samples' ids."""
        run = self._simulated.run_of(world, policy=name, decisions=self._policy.decisions)
        if not self._state.summaries:
            # What was late until after the end.
            self._cluster.report(world)
            self._settle(to_ms(world.now_s))
        (summary,) = self._state.summaries
        return replace(run, num_samples=summary.trained.num_samples, num_lost=summary.num_lost)
