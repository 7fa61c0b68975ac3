"""The store as the services see it: ownership, leases, leads, job state, commands, boots, and who may write at all.

What every implementation promises (tests/contract/test_store.py asks it of each):
- Every call but `identity`, `attach`, `contents` and `adopt` is refused with StoreNotAdopted unless the server is the
  one, and the term the one, that this client attached to. After a refusal: `attach` again (adoption may have to come
  first) and rebuild from what the store then says; what was decided before may no longer hold.
- No write is blind: each happens only if what it was decided on is still there.
- Every call may be repeated: a repeat of what took effect gives the same result and changes nothing. So
  StoreUnavailable (outcome unknown) is answered by calling again.
- Time is the store's clock, in Unix milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.ownership.records import GpuRecord, MoveState, Outcome, Transition
from tidegate.types import CommandId, GpuId, InstanceId, JobId, Layout, Role, Token


@dataclass(frozen=True, slots=True)
class LeadRecord:
    """Who leads a component of a job. `epoch` grows with every granted campaign and is never used twice."""

    job: JobId
    role: Role
    instance: InstanceId
    endpoint: str
    epoch: int
    expires_unix_ms: int


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state as its scheduler wrote it. `write` counts writes; `version` guards transitions, so progress folded
    into the state leaves it as it is."""

    payload: bytes
    write: int
    version: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The server that answers, and the one that was adopted last (None: none ever), under which term."""

    run_id: str
    adopted_run_id: str | None
    term: int

    @property
    def is_open(self) -> bool:
        return self.run_id == self.adopted_run_id


@dataclass(frozen=True, slots=True)
class StoreContents:
    """What adoption starts from: all GPUs by id, and the open transitions of all jobs by id."""

    gpus: tuple[GpuRecord, ...]
    transitions: tuple[Transition, ...]


class OwnershipMap(Protocol):
    async def gpus(self) -> dict[GpuId, GpuRecord]: ...

    async def register(self, gpus: tuple[GpuId, ...]) -> None:
        """Adds those the map does not have, free; the others stay as they are."""
        ...

    async def mark_lost(self, gpu: GpuId, token: Token) -> GpuRecord:
        """Owned or free -> lost. StaleToken when it was granted anew since, UnknownGpu."""
        ...

    async def reclaim(self, gpu: GpuId, token: Token) -> GpuRecord:
        """Lost -> free, after its gate reported it free. StaleToken when it was granted anew since, UnknownGpu."""
        ...


class Transitions(Protocol):
    async def transitions(self, job: JobId) -> tuple[Transition, ...]:
        """All of the job's transitions, open and closed, by id."""
        ...

    async def plan(self, transition: Transition) -> Transition:
        """Writes the record and takes hold of its GPUs, all or nothing; the stored record if it was planned before.

        StaleToken: a GPU changed owner or token; GpuBusy: one is lost or held by another open transition;
        VersionConflict: the job's version is not `planned_version` (0: no state saved), or the id is another plan's.
        """
        ...

    async def advance(
        self, transition: Transition, gpu: GpuId, *, from_state: MoveState, to_state: MoveState
    ) -> Transition:
        """One GPU's next step up to `acquiring`, which hands it to the target under a new token of the store's term.

        Of `transition` the job, id and GPUs are used; its progress is read afresh and handed back. StaleToken; GpuBusy
        (lost); VersionConflict (the move is in neither state, or the transition is closed); IllegalStep (`to_state`
        does not follow `from_state`).
        """
        ...

    async def commit(self, transition: Transition, role: Role, layout: Layout | None) -> Transition:
        """The component's only commit point: its part and all GPUs it acquires, at once.

        IllegalStep when a GPU it acquires is not `acquiring`, one that leaves it not yet `draining`, or the layout not
        the planned one; VersionConflict (the transition is closed); StaleToken; GpuBusy (lost).
        """
        ...

    async def close(self, transition: Transition, outcome: Outcome) -> Transition:
        """Ends it and lets go of its GPUs: one not released stays with its owner, one released is free, one handed to
        a component that did not commit is lost until its gate reports it free. IllegalStep when its state does not
        earn this outcome (`tidegate.ownership.transitions.earned_outcome`)."""
        ...


class Leases(Protocol):
    """A lease detects and grants nothing. It may be renewed after it expired."""

    async def renew(self, holder: InstanceId, *, ttl_ms: int) -> bool:
        """Whether the lease was in force until now; false also for its first time. Unknown after StoreUnavailable: a
        repeat finds what the first call wrote."""
        ...

    async def release(self, holder: InstanceId) -> None:
        """The holder leaves, or its expiry was dealt with: it is no longer among the expired."""
        ...

    async def expired(self) -> tuple[InstanceId, ...]: ...

    async def now_unix_ms(self) -> int: ...


class Leads(Protocol):
    async def campaign(self, job: JobId, role: Role, *, instance: InstanceId, endpoint: str, ttl_ms: int) -> LeadRecord:
        """Granted, under a new epoch, when nobody leads, the lead expired, or it is an earlier start of this instance.

        The record in force afterwards: it is the caller's when `instance` is. A lead goes on by `renew_lead`; each
        `campaign` of its own ends its epoch.
        """
        ...

    async def renew_lead(self, lead: LeadRecord, *, ttl_ms: int) -> LeadRecord | None:
        """None when another epoch began: the caller leads no more."""
        ...

    async def resign(self, lead: LeadRecord) -> None:
        """Nothing happens when another epoch began."""
        ...


class JobStates(Protocol):
    async def load(self, job: JobId) -> JobState | None: ...

    async def save(self, job: JobId, payload: bytes, *, expected_write: int, version: int) -> JobState:
        """Compare-and-set on `write` (0: none yet); VersionConflict. ValueError when `version` would fall."""
        ...


class CommandLog(Protocol):
    async def recall(self, job: JobId, command: CommandId) -> bytes | None:
        """The result stored for a command, None before it has one."""
        ...

    async def remember(self, job: JobId, command: CommandId, result: bytes) -> bytes:
        """Stores the first result and returns it to everyone who comes after."""
        ...


class Boots(Protocol):
    async def next_boot(self, instance: InstanceId) -> int:
        """Greater than any boot of this instance before; the first is 1."""
        ...


class StoreIdentity(Protocol):
    async def identity(self) -> Identity: ...

    async def attach(self) -> Identity:
        """Takes the (run id, term) under which the store is open; all later calls are made under them.
        StoreNotAdopted when it is not open."""
        ...

    async def contents(self) -> StoreContents: ...

    async def adopt(self, *, expected: Identity, term: int, rebuilt: StoreContents) -> Identity:
        """Opens the store under `term` with `rebuilt` in place of `contents`, all or nothing.
        VersionConflict when the identity is not `expected` any more, or the store is open already."""
        ...


class Store(
    OwnershipMap, Transitions, Leases, Leads, JobStates, CommandLog, Boots, StoreIdentity, Protocol
):  # what `__main__` builds and hands out in parts
    """All of it, as one client of one server."""

    async def aclose(self) -> None: ...
