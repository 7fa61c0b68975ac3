"""The ownership store of a simulated cluster: who owns which GPU, and the records of transitions, in memory.

Invariant: a step that the rules of ownership refuse changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from tidegate.ownership import transitions
from tidegate.ownership.records import (
    GpuBusy,
    GpuRecord,
    GpuState,
    IllegalStep,
    Part,
    StaleToken,
    Transition,
    VersionConflict,
)
from tidegate.types import GpuId, Layout, Role, Token, TransitionId

TERM = 1

REFUSED = (GpuBusy, IllegalStep, StaleToken, VersionConflict)
"""What the store answers to a step that the records do not allow."""


class Store:
    """`saved_version` is the job's as its scheduler last wrote it: a plan made on another is refused."""

    def __init__(self, gpus: Iterable[GpuId]) -> None:
        self.saved_version = 0
        self.term = TERM
        self._gpus = {gpu: GpuRecord(gpu, GpuState.FREE, None, Token(0, 0)) for gpu in sorted(gpus)}
        self._records: dict[TransitionId, Transition] = {}
        self._observed: ev.OwnershipObserved | None = None

    def register(self, gpus: Iterable[GpuId]) -> None:
        """Those that it does not know yet, as free."""
        missing = [gpu for gpu in gpus if gpu not in self._gpus]
        for gpu in missing:
            self._put(GpuRecord(gpu, GpuState.FREE, None, Token(0, 0)))
        if missing:
            self._gpus = dict(sorted(self._gpus.items()))

    def observed(self) -> ev.OwnershipObserved | None:
        """What it says now; None when it said so before. A transition that is closed is told once as such."""
        if self._observed is not None:
            return None
        self._observed = ev.OwnershipObserved(tuple(self._gpus.values()), tuple(self._records.values()))
        self._records = {each.id: each for each in self._records.values() if each.is_open}
        return self._observed

    def part(self, transition: str, role: Role) -> Part:
        return self._records[TransitionId(transition)].part(role)

    def operate(self, command: cmd.StoreCommand) -> None:
        """REFUSED where the records do not allow it."""
        match command:
            case cmd.PlanTransition():
                known = self._records.get(command.transition.id)
                if known is None:
                    self._keep(transitions.plan(command.transition, self._gpus, job_version=self.saved_version))
            case cmd.AdvanceMove():
                stored, record = self._records[command.transition_id], self._gpus[command.gpu]
                states = {"from_state": command.from_state, "to_state": command.to_state}
                self._keep(transitions.advance(stored, record, term=self.term, **states))
            case cmd.CommitPart():
                self.commit(command.transition_id, command.role, command.layout)
            case cmd.CloseTransition():
                self._keep(transitions.close(self._records[command.transition_id], self._gpus, command.outcome))
            case cmd.MarkLost():
                self._put(transitions.mark_lost(self._gpus[command.gpu], command.token))
            case cmd.Reclaim():
                self._put(transitions.reclaim(self._gpus[command.gpu], command.token))

    def commit(self, transition: str, role: Role, layout: Layout | None) -> None:
        """REFUSED as `operate`."""
        self._keep(transitions.commit(self._records[TransitionId(transition)], self._gpus, role, layout))

    def _keep(self, change: transitions.Change) -> None:
        self._records[change.transition.id] = change.transition
        for record in change.gpus:
            self._gpus[record.gpu] = record
        self._observed = None

    def _put(self, record: GpuRecord) -> None:
        self._gpus[record.gpu] = record
        self._observed = None
