"""Replays a real job's recorded events through its scheduler, and asks another policy for its choices.

The events go through `turn` at their recorded times, and the job's own policy decides. It also decides at the deadlines
between events. The record has no ownership store: the store follows from the commands to it, and from the commits that
leads report. Commands to leads are not carried out, since the record has their effects.

The other policy sees the same job. It is asked whenever the job's own policy is, and remembers its choices. None of its
choices is carried out. A replay therefore shows when this policy would have moved GPUs, but not the effect.

Invariant: the same events give the same commands, byte for byte. [test_replay: own_policy_commands_the_same]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.proposals import proposal_of
from services.scheduler.decide.turn import begin, finish
from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from services.scheduler.state.remembered import Remembered
from simulator.outcome import PolicyDecision
from simulator.store import TERM, Store
from simulator.watched_policy import WatchedPolicy
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.ownership.records import PartKind
from tidegate.ownership.transitions import REFUSALS
from tidegate.types import JobId, Role

MAX_TURNS = 10_000
"""The most decisions at one instant."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event with its time."""

    at_ms: int
    event: ev.Event


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    - `commands`: the commands to leads, in the order of their issue.
    - `num_answered`: the number of recorded answers to one of these commands.
    - `strange`: the ids of commands with a recorded answer that the replay did not issue.
    - `decisions`: those of the other policy, in seconds since the first event.
    """

    job: str
    policy: str
    num_events: int
    commands: tuple[cmd.LeadCommand, ...]
    num_answered: int
    strange: tuple[str, ...]
    decisions: tuple[PolicyDecision, ...]


def section_of(recorded: Sequence[Recorded]) -> SchedulerSection:
    """The scheduler section of the job's own config. ValueError: no event submits a job."""
    for each in recorded:
        if isinstance(each.event.body, ev.JobSubmitted):
            return SchedulerSection.model_validate(json.loads(each.event.body.config_json).get("scheduler", {}))
    raise ValueError(f"none of {len(recorded)} events submits a job: give a job's events from its first one on")


def replayed(recorded: Sequence[Recorded], policy: Policy, *, name: str) -> Replayed:
    """ValueError: the record does not have the beginning of a job."""
    own = policy_of(section_of(recorded))
    replay = _Replay(recorded, own, policy)
    for at, each in enumerate(recorded):
        replay.apply(each, term=_term(recorded, at))
    return replay.result(name)


def _term(recorded: Sequence[Recorded], at: int) -> int:
    """The store's term at this event: the term of the next tokens in the record."""
    return next((grant.token.term for each in recorded[at:] for grant in each.event.grants), TERM)


class _Replay:
    def __init__(self, recorded: Sequence[Recorded], own: Policy, other: Policy) -> None:
        self._recorded, self._own, self._other = recorded, own, WatchedPolicy(other)
        self._state = ClusterState(job=JobId(recorded[0].event.job))
        self._store = Store(())
        self._remembered = Remembered()
        self._commands: list[cmd.LeadCommand] = []

    def apply(self, recorded: Recorded, *, term: int) -> None:
        self._store.term = term
        while (due_ms := next_due_ms(self._state)) is not None and due_ms < recorded.at_ms:
            if self._state.phase in TERMINAL:
                break
            if not self._decide(due_ms) and next_due_ms(self._state) == due_ms:
                break
        if isinstance(recorded.event.body, ev.LayoutCommitted):
            self._commit(recorded.event, recorded.event.body)
        self._decide(recorded.at_ms, recorded.event)

    def result(self, name: str) -> Replayed:
        issued = {command.header.id for command in self._commands}
        bodies = [each.event.body for each in self._recorded]
        answers = [body.command_id for body in bodies if isinstance(body, ev.CommandAnswered)]
        return Replayed(
            job=self._state.job,
            policy=name,
            num_events=len(self._recorded),
            commands=tuple(self._commands),
            num_answered=sum(answer in issued for answer in answers),
            strange=tuple(answer for answer in answers if answer not in issued),
            decisions=tuple(self._other.decisions),
        )

    def _decide(self, now_ms: int, *events: ev.Event) -> bool:
        """Decide until no store command is left. Returns whether there was any command."""
        for number in range(MAX_TURNS):
            begun = begin(self._state, events if number == 0 else ())
            made = finish(begun, now_ms, self._own, observed=self._observed(begun.after))
            self._state, decision = made.after, made.decided
            self._store.saved_version = self._state.version
            self._commands.extend(each for each in decision.commands if isinstance(each, cmd.LeadCommand))
            if number == 0:
                self._ask_the_other(now_ms)
            operations = [each for each in decision.commands if isinstance(each, cmd.StoreCommand)]
            for operation in operations:
                self._operate(operation)
            if not operations:
                return bool(number or decision.commands)
        raise AssertionError(f"{MAX_TURNS} decisions at {now_ms} ms came to no end: {decision.reason}")

    def _observed(self, state: ClusterState) -> ev.OwnershipObserved | None:
        """The store's contents. None: they are unchanged since the last call."""
        if state.spec is None:
            return None
        self._store.register(state.spec.gpus)
        return self._store.changed()

    def _ask_the_other(self, now_ms: int) -> None:
        if self._state.spec is None or self._state.phase in TERMINAL:
            return
        seen = replace(self._state, remembered=self._remembered)
        self._remembered = proposal_of(seen, self._other, now_ms).remembered
        self._other.note((now_ms - self._recorded[0].at_ms) / 1000)

    def _commit(self, event: ev.Event, body: ev.LayoutCommitted) -> None:
        """A lead commits a resize by itself. The scheduler commits everything else."""
        transition = self._state.transition_of(event.role) if event.role else None
        if transition is None or transition.id != event.transition_id or event.role is None:
            return
        if transition.part(event.role).kind is PartKind.RESIZE:
            self._operate_commit(transition.id, event.role, body)

    def _operate_commit(self, transition: str, role: Role, body: ev.LayoutCommitted) -> None:
        try:
            self._store.commit(transition, role, body.layout)
        except REFUSALS:
            # The recorded store had another history. The commands after this event show the difference.
            return

    def _operate(self, command: cmd.StoreCommand) -> None:
        try:
            self._store.operate(command)
        except REFUSALS:
            # A real store refused this command too: the record has the answer to it.
            return
