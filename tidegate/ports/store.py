"""The store as the services see it: ownership, leases, leads, job state, commands, boots, and the right to write.

Every implementation keeps these promises (tests/contract/test_store_*.py check each implementation):
- Every call but `identity`, `attach`, `contents` and `adopt` is refused with StoreNotAdopted, unless this client
  attached to this very server under this very term. [test_store_adoption: refused_after_another_client_adopted]
- No write is blind: it happens only if the values that it was decided on are still there.
  [test_store_records: state_is_saved_only_over_the_write]
- Every call may be repeated: a repeat gives the same result and changes nothing.
  [test_store_ownership: step_repeated_changes_nothing]
- Time is the store's clock, in Unix milliseconds. [test_store_leads: lease_expires_by_the_stores_clock]

What a caller does after a failure:
- StoreNotAdopted: `attach` again (adoption may have to come first), then rebuild from the store's contents. Former
  decisions may no longer hold.
- StoreUnavailable: the outcome is unknown. Call again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.ownership.records import GpuRecord, MoveState, Outcome, Transition
from tidegate.types import CommandId, Drain, GpuId, InstanceId, JobId, Layout, NodeId, Role, Token, TransitionId


@dataclass(frozen=True, slots=True)
class LeadRecord:
    """The lead of a component of a job. `epoch` grows with every granted campaign and is never used twice. A later term
    begins above, so that this holds where the store has lost the record of earlier ones."""

    job: JobId
    role: Role
    instance: InstanceId
    endpoint: str
    epoch: int
    expires_unix_ms: int


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state as its scheduler wrote it.

    `write` counts writes. `version` guards transitions; folding progress into the state does not raise it.
    """

    payload: bytes
    write: int
    version: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The server that answers, the server that was adopted last (None: never), and the term of that adoption."""

    run_id: str
    adopted_run_id: str | None
    term: int

    @property
    def is_open(self) -> bool:
        return self.run_id == self.adopted_run_id


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The input of an adoption: all GPUs by id, and the open transitions of all jobs by id."""

    gpus: tuple[GpuRecord, ...]
    transitions: tuple[Transition, ...]


@dataclass(frozen=True, slots=True)
class Ownership:
    """All GPUs and a job's transitions, as they were at one moment by the store's clock."""

    now_unix_ms: int
    gpus: Mapping[GpuId, GpuRecord]
    transitions: tuple[Transition, ...]


class OwnershipMap(Protocol):
    async def gpus(self) -> dict[GpuId, GpuRecord]: ...

    async def register(self, gpus: tuple[GpuId, ...]) -> None:
        """Adds the GPUs that the map does not have, as free. The others stay as they are."""
        ...

    async def mark_lost(self, gpu: GpuId, token: Token) -> GpuRecord:
        """Owned or free -> lost. StaleToken when the GPU has a newer grant. UnknownGpu."""
        ...

    async def reclaim(self, gpu: GpuId, token: Token) -> GpuRecord:
        """Lost -> free, after the gate reported the GPU free. StaleToken when the GPU has a newer grant. UnknownGpu."""
        ...


class Transitions(Protocol):
    async def transitions(self, job: JobId) -> tuple[Transition, ...]:
        """The job's open transitions, and the closed ones that are kept, by id."""
        ...

    async def current_transitions(self, job: JobId, *, known: Collection[TransitionId] = ()) -> tuple[Transition, ...]:
        """The job's open transitions, and those of `known` that were closed, by id. It reads no other closed one."""
        ...

    async def ownership(self, job: JobId, *, known: Collection[TransitionId] = ()) -> Ownership:
        """All GPUs with the `current_transitions`, in one call."""
        ...

    async def forget_transitions(self, job: JobId, *, keep: int) -> None:
        """Drops the closed transitions but the `keep` last ones by number, and the results of their commands."""
        ...

    async def plan(self, transition: Transition) -> Transition:
        """Writes the record and claims its GPUs, all or nothing. Returns the stored record if it was planned before.

        - StaleToken: a GPU changed its owner or token.
        - GpuBusy: a GPU is lost, or another open transition holds it.
        - VersionConflict: the job's version is not `planned_version` (0: no state saved), or the id has another plan.
        """
        ...

    async def advance(
        self, transition: Transition, *gpus: GpuId, from_state: MoveState, to_state: MoveState
    ) -> Transition:
        """The next step of these GPUs, up to `acquiring`, which hands them to the target under new tokens of the
        store's term. All take it, or where it is refused to one of them, none.

        The call uses the job, id and GPUs of `transition`, reads the progress afresh and returns it.

        - StaleToken.
        - GpuBusy: the GPU is lost.
        - VersionConflict: the move is in neither state, or the transition is closed.
        - IllegalStep: `to_state` does not follow `from_state`.
        """
        ...

    async def commit(self, transition: Transition, role: Role, layout: Layout | None) -> Transition:
        """The only commit point of the component: its part and all GPUs that it acquires, at once.

        - IllegalStep: a GPU that it acquires is not `acquiring`, a GPU that leaves it is not yet `draining`, or the
          layout is not the planned one.
        - VersionConflict: the transition is closed.
        - StaleToken.
        - GpuBusy: a GPU is lost.
        """
        ...

    async def close(self, transition: Transition, outcome: Outcome) -> Transition:
        """Ends the transition and frees its hold on the GPUs.

        - A GPU that was not released stays with its owner.
        - A released GPU is free.
        - A GPU handed to a component that did not commit is lost until its gate reports it free.

        IllegalStep when the transition's state does not earn this outcome
        (`tidegate.ownership.transitions.earned_outcome`).
        """
        ...


class Leases(Protocol):
    """A lease detects a dead holder and grants nothing. A holder may renew it after it expired."""

    async def renew(self, job: JobId, holder: InstanceId, *, ttl_ms: int) -> bool:
        """Whether the lease was in force until now. False for the first renewal too.

        After StoreUnavailable the answer is not known: a repeat finds what the first call wrote.
        """
        ...

    async def release(self, job: JobId, holder: InstanceId) -> None:
        """Takes the holder off the list of expired leases: it leaves, or its expiry was handled."""
        ...

    async def expired(self, job: JobId, *, longest_ms: int) -> tuple[InstanceId, ...]:
        """The holders of the job's expired leases.

        A lease that would last longer than `longest_ms` from now on is shortened to that: the store's clock went back.
        """
        ...

    async def now_unix_ms(self) -> int: ...


class Leads(Protocol):
    async def campaign(self, job: JobId, role: Role, *, instance: InstanceId, endpoint: str, ttl_ms: int) -> LeadRecord:
        """Returns the record in force afterwards. The caller leads when `instance` is its own.

        The store grants a new epoch when nobody leads, the lead expired, or the lead is an earlier start of this
        instance. Another's lead that would last longer than `ttl_ms` from now on is shortened to that: the store's
        clock went back. A lead goes on with `renew_lead`: another `campaign` of its own ends its epoch.
        """
        ...

    async def renew_lead(self, lead: LeadRecord, *, ttl_ms: int) -> LeadRecord | None:
        """None when another epoch began: the caller no longer leads."""
        ...

    async def resign(self, lead: LeadRecord) -> None:
        """Does nothing when another epoch began."""
        ...


class JobStates(Protocol):
    async def load(self, job: JobId) -> JobState | None: ...

    async def save(self, job: JobId, payload: bytes, *, expected_write: int, version: int) -> JobState:
        """Compare-and-set on `write` (0: none yet). VersionConflict. ValueError when `version` would fall."""
        ...

    async def forget_commands(self, job: JobId, *, keep: Collection[str]) -> None:
        """Removes the results of all commands but those of these ids, which stand without the number of the attempt."""
        ...


class CommandLog(Protocol):
    async def recall(self, job: JobId, command: CommandId) -> bytes | None:
        """The result stored for a command. None before there is one."""
        ...

    async def remember(self, job: JobId, command: CommandId, result: bytes) -> bytes:
        """Stores the first result. Returns the first result to every later caller too."""
        ...


class Boots(Protocol):
    async def next_boot(self, job: JobId, instance: InstanceId) -> int:
        """A number greater than any earlier boot of this instance, also where the store has lost the record of them: a
        later term begins above."""
        ...


@dataclass(frozen=True, slots=True)
class Submissions:
    """The records of a cluster's jobs, each a text of its scheduler, the number of rounds that have placed jobs, and
    the nodes that get none, with what their jobs do. `paused`: why no job starts; empty: jobs start."""

    texts: Mapping[JobId, bytes]
    rounds: int
    drained: Mapping[NodeId, Drain] = field(default_factory=dict)
    paused: str = ""


class JobRegistry(Protocol):
    """The jobs that were submitted to the cluster."""

    async def submissions(self) -> Submissions: ...

    async def write_submissions(
        self,
        texts: Mapping[JobId, bytes | None],
        *,
        expected: Mapping[JobId, bytes | None],
        after_round: int | None = None,
    ) -> None:
        """Writes the texts, all or none; None removes one.

        `after_round`: the write is of a round that places jobs. Of several rounds that were decided after the same one,
        one is written: they would give the same GPUs to different jobs.

        VersionConflict where a text is not as expected any more (None: not there), or another round was first.
        """
        ...

    async def drain_node(self, node: NodeId, drain: Drain | None) -> None:
        """The node gets no job from now on. None: it gets jobs again. A round that was decided before does not
        count."""
        ...

    async def pause(self, reason: str) -> None:
        """No job starts from now on; a pause that is there keeps its reason. Empty: they start again. A round that was
        decided before does not count."""
        ...

    async def clear_submission(self, job: JobId, text: bytes, *, expected: bytes) -> None:
        """Writes the text, and removes all other records of the job, but those of GPUs and of open transitions: no
        process of it lives. VersionConflict where the text is not as expected any more."""
        ...

    async def keep_config(self, job: JobId, config: str) -> str:
        """Keeps a submitted config. Returns the name under which `config_of` finds it, until the job is cleared."""
        ...

    async def config_of(self, job: JobId, name: str) -> str | None: ...


class StoreIdentity(Protocol):
    @property
    def term(self) -> int:
        """The one that the last `attach` noted. StoreNotAdopted where there was none."""
        ...

    async def identity(self) -> Identity: ...

    async def attach(self) -> Identity:
        """Notes the (run id, term) under which the store is open. All later calls are made under them.

        StoreNotAdopted when the store is not open.
        """
        ...

    async def contents(self) -> StoreContents: ...

    async def adopt(self, *, expected: Identity, term: int, rebuilt: StoreContents) -> Identity:
        """Opens the store under `term` with `rebuilt` in place of `contents`, all or nothing.

        VersionConflict when the identity is not `expected`, or the store is open already.
        """
        ...

    async def shut(self, *, expected: Identity) -> None:
        """Refuses all clients until the store is adopted again. VersionConflict when the identity is not `expected`."""
        ...


class Store(
    OwnershipMap,
    Transitions,
    Leases,
    Leads,
    JobStates,
    CommandLog,
    Boots,
    JobRegistry,
    StoreIdentity,
    Protocol,
):  # what `__main__` builds and hands out in parts
    """All ports, as one client of one server."""

    async def aclose(self) -> None: ...
