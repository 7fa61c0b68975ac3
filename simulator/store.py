"""An ownership store in memory, by the rules of `tidegate.ownership`: the owner of each GPU, and the transitions.

The simulator, a replay and the scheduler's tests have their ownership in one.
Invariants:
- A step that the rules refuse changes nothing.
- A plan that is repeated changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from tidegate.ownership import transitions
from tidegate.ownership.records import (
    GpuRecord,
    GpuState,
    Part,
    Transition,
    UnknownTransition,
    VersionConflict,
)
from tidegate.types import GpuId, Layout, Role, Token, TransitionId

TERM = 1


class Store:
    """`gpus` are in the order of their names. `saved_version` is the job's version as its scheduler wrote it last: the
    store refuses a plan that was made on another version."""

    def __init__(self, gpus: Iterable[GpuId]) -> None:
        self.saved_version = 0
        self.term = TERM
        self.gpus = {gpu: GpuRecord(gpu, GpuState.FREE, None, Token(0, 0)) for gpu in sorted(gpus)}
        self.records: dict[TransitionId, Transition] = {}
        self._is_read = False

    def register(self, gpus: Iterable[GpuId]) -> None:
        """GPUs that the store does not know yet are free."""
        missing = [gpu for gpu in gpus if gpu not in self.gpus]
        for gpu in missing:
            self._put(GpuRecord(gpu, GpuState.FREE, None, Token(self.term, 0)))
        if missing:
            self.gpus = dict(sorted(self.gpus.items()))

    def changed(self) -> ev.OwnershipObserved | None:
        """All that the store holds, or None when nothing has changed since the last call.

        The store forgets a closed transition once it was returned.
        """
        if self._is_read:
            return None
        self._is_read = True
        observed = self.observed()
        self.records = {each.id: each for each in self.records.values() if each.is_open}
        return observed

    def observed(self) -> ev.OwnershipObserved:
        """All that the store holds, closed transitions too, in the order of their plans."""
        return ev.OwnershipObserved(tuple(self.gpus.values()), tuple(self.records.values()))

    def part(self, transition: str, role: Role) -> Part:
        return self.records[TransitionId(transition)].part(role)

    def operate(self, command: cmd.StoreCommand) -> None:
        """One of `REFUSALS` where the records do not allow it."""
        match command:
            case cmd.PlanTransition():
                self._plan(command.transition)
            case cmd.AdvanceMove():
                stored, record = self._stored(command.transition_id), self.gpus[command.gpu]
                states = {"from_state": command.from_state, "to_state": command.to_state}
                self._keep(transitions.advance(stored, record, term=self.term, **states))
            case cmd.CommitPart():
                self.commit(command.transition_id, command.role, command.layout)
            case cmd.CloseTransition():
                self._keep(transitions.close(self._stored(command.transition_id), self.gpus, command.outcome))
            case cmd.MarkLost():
                self._put(transitions.mark_lost(self.gpus[command.gpu], command.token))
            case cmd.Reclaim():
                self._put(transitions.reclaim(self.gpus[command.gpu], command.token))

    def commit(self, transition: str, role: Role, layout: Layout | None) -> None:
        """One of `REFUSALS` where the records do not allow it."""
        self._keep(transitions.commit(self._stored(transition), self.gpus, role, layout))

    def _stored(self, transition: str) -> Transition:
        if (stored := self.records.get(TransitionId(transition))) is None:
            raise UnknownTransition(f"there is no transition {transition}")
        return stored

    def _plan(self, planned: Transition) -> None:
        known = self.records.get(planned.id)
        if known is None:
            self._keep(transitions.plan(planned, self.gpus, job_version=self.saved_version))
        elif not transitions.same_plan(known, planned):
            raise VersionConflict(f"{planned.id} is another plan's")

    def _keep(self, change: transitions.Change) -> None:
        self.records[change.transition.id] = change.transition
        for record in change.gpus:
            self.gpus[record.gpu] = record
        self._is_read = False

    def _put(self, record: GpuRecord) -> None:
        self.gpus[record.gpu] = record
        self._is_read = False
