"""All store ports on top of `Cells`. Each call reads its cells, decides purely, and writes if the cells are unchanged.

Invariants:
- Every write expects all cells that it was decided on. A decision on a stale cell is taken again or refused.
  [test_store_records: many_states_saved_at_once]
- A `decide` function writes nothing when its effect is already there, so any call may be repeated.
  [test_store_ownership: step_repeated_changes_nothing]
- A value that is none of its cell's is told by name. [test_store_records: told_by_name]
- A call without an answer is repeated a few times, each time with a new decision on the store's contents. Then it fails
  with StoreUnavailable. A call waits at most for these repeats and the adapter's own deadlines.
  [test_redis_store: given_up_in_bounded_time]

`tidegate.adapters.tables` says which value is in which cell.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import structlog

from tidegate.adapters import tables
from tidegate.adapters.cells import Cell, Cells, Reading, Session, Writes
from tidegate.ownership import transitions as rules
from tidegate.ownership.records import (
    GpuRecord,
    GpuState,
    MoveState,
    Outcome,
    StoreNotAdopted,
    StoreUnavailable,
    Transition,
    UnknownTransition,
    VersionConflict,
    decode_transition,
    encode_gpu,
    transition_number,
)
from tidegate.ports.store import Identity, JobState, LeadRecord, Ownership, StoreContents, Submissions
from tidegate.types import CommandId, Drain, GpuId, InstanceId, JobId, Layout, NodeId, Role, Token, TransitionId

T = TypeVar("T")

RETRY_DELAYS_S = (0.02, 0.1, 0.3)
"""The pauses between repeats of a call without an answer: enough for a reconnect, short beside a lease's TTL."""
COUNTS_PER_TERM = 1_000_000
"""Boots and epochs of term 3 begin at 3,000,001: above those of earlier terms, also where the store has lost them."""
MAX_RACES = 32
"""The compare-and-sets that a call may lose. Each loss is another client's progress; 32 in a row are a fault."""


class CellStore:
    """The `Store` port, as one client sees it. `attach` sets the session that all other calls are made under."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._session: Session | None = None
        self._known_states: dict[JobId, JobState | None] = {}
        """What this client read or wrote last: it is expected without another read."""

    async def aclose(self) -> None:
        await self._cells.aclose()

    @property
    def term(self) -> int:
        return self._attached().term

    async def identity(self) -> Identity:
        return await self._repeated(self._cells.identity)

    async def attach(self) -> Identity:
        found = await self.identity()
        if not found.is_open:
            adopted = (found.adopted_run_id or "none")[:12]
            raise StoreNotAdopted(
                f"the store's run id is {found.run_id[:12]}, last adopted {adopted} under term {found.term}: it "
                "restarted or is new; adopt it first"
            )
        self._session = Session(found.run_id, found.term)
        return found

    async def contents(self) -> StoreContents:
        reading = await self._repeated(lambda: self._cells.read(None, tables=("gpus", "open")))
        return StoreContents(
            gpus=tuple(tables.read_gpus(reading).values()),
            transitions=tuple(sorted(tables.read_open(reading), key=lambda each: each.id)),
        )

    async def adopt(self, *, expected: Identity, term: int, rebuilt: StoreContents) -> Identity:
        writes: dict[Cell, bytes | None] = {}
        for record in rebuilt.gpus:
            writes.update(tables.write_gpu(record))
        for transition in rebuilt.transitions:
            writes.update(tables.write_transition(transition))
        if not await self._cells.open(expected, term=term, writes=writes):
            raise VersionConflict(
                f"the store {expected.run_id[:12]} was adopted or restarted meanwhile (term {term} was to follow "
                f"{expected.term}): read its identity again"
            )
        return Identity(expected.run_id, expected.run_id, term)

    async def shut(self, *, expected: Identity) -> None:
        if not await self._cells.shut(expected):
            raise VersionConflict(
                f"the store {expected.run_id[:12]} was adopted or restarted meanwhile (it was under term "
                f"{expected.term}): read its identity again"
            )

    async def gpus(self) -> dict[GpuId, GpuRecord]:
        return tables.read_gpus(await self._read(tables=("gpus",)))

    async def register(self, gpus: tuple[GpuId, ...]) -> None:
        term = self._attached().term
        cells = {tables.gpu_cell(gpu): GpuRecord(gpu, GpuState.FREE, None, Token(term, 0)) for gpu in gpus}

        def decide(reading: Reading) -> tuple[Writes, None]:
            return {cell: encode_gpu(new) for cell, new in cells.items() if reading.cells[cell] is None}, None

        await self._write(tuple(cells), decide)

    async def mark_lost(self, gpu: GpuId, token: Token) -> GpuRecord:
        return await self._change_gpu(gpu, lambda record: rules.mark_lost(record, token))

    async def reclaim(self, gpu: GpuId, token: Token) -> GpuRecord:
        return await self._change_gpu(gpu, lambda record: rules.reclaim(record, token))

    async def transitions(self, job: JobId) -> tuple[Transition, ...]:
        reading = await self._read(tables=("open", f"closed:{job}"))
        return _of_job(job, tables.read_open(reading), reading.tables[f"closed:{job}"])

    async def current_transitions(self, job: JobId, *, known: Collection[TransitionId] = ()) -> tuple[Transition, ...]:
        return _current(await self._read(tables=("open",), cells=_closed_cells(job, known)), job)

    async def ownership(self, job: JobId, *, known: Collection[TransitionId] = ()) -> Ownership:
        reading = await self._read(tables=("gpus", "open"), cells=_closed_cells(job, known))
        return Ownership(reading.now_unix_ms, tables.read_gpus(reading), _current(reading, job))

    async def forget_transitions(self, job: JobId, *, keep: int) -> None:
        closed = f"closed:{job}"
        in_order = sorted(map(TransitionId, (await self._read(tables=(closed,))).tables[closed]), key=transition_number)
        await self._remove([tables.closed_cell(job, each) for each in in_order[: max(0, len(in_order) - keep)]])

    async def plan(self, transition: Transition) -> Transition:
        def decide(reading: Reading) -> tuple[Writes, Transition]:
            stored = tables.read_transition(reading, transition)
            if stored is not None:
                if not rules.same_plan(stored, transition):
                    raise VersionConflict(
                        f"transition {transition.id} is stored as another plan: give this one a new id"
                    )
                return {}, stored
            state = tables.read_job_state(reading, transition.job)
            change = rules.plan(transition, tables.read_gpus(reading), job_version=state.version if state else 0)
            return {**tables.write_transition(transition), **tables.write_gpus(change.gpus)}, transition

        return await self._write((*tables.transition_cells(transition), tables.state_cell(transition.job)), decide)

    async def advance(
        self, transition: Transition, *gpus: GpuId, from_state: MoveState, to_state: MoveState
    ) -> Transition:
        term = self._attached().term

        def step(stored: Transition, records: Mapping[GpuId, GpuRecord]) -> rules.Change:
            known = [tables.known_gpu(records, gpu) for gpu in gpus]
            return rules.advance_all(stored, known, from_state=from_state, to_state=to_state, term=term)

        return await self._change_transition(transition, step)

    async def commit(self, transition: Transition, role: Role, layout: Layout | None) -> Transition:
        return await self._change_transition(transition, lambda stored, gpus: rules.commit(stored, gpus, role, layout))

    async def close(self, transition: Transition, outcome: Outcome) -> Transition:
        return await self._change_transition(transition, lambda stored, gpus: rules.close(stored, gpus, outcome))

    async def renew(self, job: JobId, holder: InstanceId, *, ttl_ms: int) -> bool:
        cell = tables.lease_cell(job, holder)
        found_in_force: list[bool] = []

        def decide(reading: Reading) -> tuple[Writes, bool]:
            until = reading.cells[cell]
            found_in_force.append(until is not None and tables.read_count(until, cell) > reading.now_unix_ms)
            # The first look counts: a repeat after a lost answer finds the lease that this call itself wrote.
            return {cell: b"%d" % (reading.now_unix_ms + ttl_ms)}, found_in_force[0]

        return await self._write((cell,), decide)

    async def release(self, job: JobId, holder: InstanceId) -> None:
        cell = tables.lease_cell(job, holder)
        await self._write((cell,), lambda reading: ({cell: None} if reading.cells[cell] else {}, None))

    async def expired(self, job: JobId, *, longest_ms: int) -> tuple[InstanceId, ...]:
        table = tables.leases_of(job)
        reading = await self._read(tables=(table,))
        leases = reading.tables[table].items()
        ends = {holder: tables.read_count(until, Cell(table, holder)) for holder, until in leases}
        for holder in [each for each, end_ms in ends.items() if end_ms > reading.now_unix_ms + longest_ms]:
            await self._shorten(Cell(table, holder), longest_ms=longest_ms)
        return tuple(sorted(InstanceId(holder) for holder, end_ms in ends.items() if end_ms <= reading.now_unix_ms))

    async def now_unix_ms(self) -> int:
        return (await self._read()).now_unix_ms

    async def campaign(self, job: JobId, role: Role, *, instance: InstanceId, endpoint: str, ttl_ms: int) -> LeadRecord:
        cell, term = tables.lead_cell(job, role), self._attached().term

        def decide(reading: Reading) -> tuple[Writes, LeadRecord]:
            stored = tables.read_lead(reading, cell)
            if stored and stored.instance != instance and stored.expires_unix_ms > reading.now_unix_ms:
                kept = replace(stored, expires_unix_ms=min(stored.expires_unix_ms, reading.now_unix_ms + ttl_ms))
                return ({} if kept == stored else {cell: tables.encode_lead(kept)}), kept
            epoch = next_count(stored.epoch if stored else 0, term)
            lead = LeadRecord(job, role, instance, endpoint, epoch, reading.now_unix_ms + ttl_ms)
            return {cell: tables.encode_lead(lead)}, lead

        return await self._write((cell,), decide)

    async def renew_lead(self, lead: LeadRecord, *, ttl_ms: int) -> LeadRecord | None:
        cell = tables.lead_cell(lead.job, lead.role)

        def decide(reading: Reading) -> tuple[Writes, LeadRecord | None]:
            stored = tables.read_lead(reading, cell)
            if stored is None or stored.epoch != lead.epoch or stored.expires_unix_ms == tables.RESIGNED:
                return {}, None
            renewed = replace(stored, expires_unix_ms=reading.now_unix_ms + ttl_ms)
            return {cell: tables.encode_lead(renewed)}, renewed

        return await self._write((cell,), decide)

    async def resign(self, lead: LeadRecord) -> None:
        cell = tables.lead_cell(lead.job, lead.role)

        def decide(reading: Reading) -> tuple[Writes, None]:
            stored = tables.read_lead(reading, cell)
            if stored is None or stored.epoch != lead.epoch or stored.expires_unix_ms == tables.RESIGNED:
                return {}, None
            return {cell: tables.encode_lead(replace(stored, expires_unix_ms=tables.RESIGNED))}, None

        await self._write((cell,), decide)

    async def load(self, job: JobId) -> JobState | None:
        found = tables.read_job_state(await self._read(cells=(tables.state_cell(job),)), job)
        self._known_states[job] = found
        return found

    async def save(self, job: JobId, payload: bytes, *, expected_write: int, version: int) -> JobState:
        saved = JobState(payload, expected_write + 1, version)
        if not await self._replaced(job, self._known_states.get(job), saved):
            await self._save(job, saved, expected_write=expected_write)
        self._known_states[job] = saved
        return saved

    async def _replaced(self, job: JobId, known: JobState | None, saved: JobState) -> bool:
        """Whether the state that this client read or wrote last was still there, and `saved` is there now. False says
        nothing: a lost answer, or another state."""
        if known is None or known.write + 1 != saved.write or known.version > saved.version:
            return False
        cell, session = tables.state_cell(job), self._attached()
        try:
            return await self._cells.swap(
                session,
                expected={cell: tables.encode_job_state(known)},
                writes={cell: tables.encode_job_state(saved)},
            )
        except StoreUnavailable:
            return False

    async def _save(self, job: JobId, saved: JobState, *, expected_write: int) -> None:
        version = saved.version

        def decide(reading: Reading) -> tuple[Writes, JobState]:
            stored = tables.read_job_state(reading, job)
            if stored == saved:
                return {}, saved
            if (stored.write if stored else 0) != expected_write:
                raise VersionConflict(
                    f"job {job} was written {stored.write if stored else 0} times, not {expected_write}: load it again"
                )
            if stored and version < stored.version:
                raise ValueError(f"job {job} is at version {stored.version} and cannot go back to {version}")
            return {tables.state_cell(job): tables.encode_job_state(saved)}, saved

        await self._write((tables.state_cell(job),), decide)

    async def clear_submission(self, job: JobId, text: bytes, *, expected: bytes) -> None:
        own = (*tables.tables_of(job), tables.configs_of(job))
        reading = await self._read(tables=own)
        removed = [tables.state_cell(job), *(Cell(table, field) for table in own for field in reading.tables[table])]
        record = tables.submission_cell(job)

        def decide(reading: Reading) -> tuple[Writes, None]:
            if reading.cells[record] not in (text, expected):
                raise VersionConflict(f"the record of job {job} has changed: read it again")
            return {**dict.fromkeys(removed), record: text}, None

        await self._write((*removed, record), decide)
        self._known_states.pop(job, None)

    async def keep_config(self, job: JobId, config: str) -> str:
        text = config.encode()
        name = hashlib.sha256(text).hexdigest()
        cell = Cell(tables.configs_of(job), name)
        await self._write((cell,), lambda reading: ({} if reading.cells[cell] == text else {cell: text}, None))
        return name

    async def config_of(self, job: JobId, name: str) -> str | None:
        cell = Cell(tables.configs_of(job), name)
        found = (await self._read(cells=(cell,))).cells[cell]
        return None if found is None else found.decode()

    async def submissions(self) -> Submissions:
        reading = await self._read(tables=("submissions", "drained"), cells=(tables.ROUNDS, tables.PAUSED))
        texts = {JobId(job): text for job, text in sorted(reading.tables["submissions"].items())}
        drained = {NodeId(node): tables.read_drain(text, node) for node, text in reading.tables["drained"].items()}
        paused = (reading.cells[tables.PAUSED] or b"").decode()
        return Submissions(texts, tables.read_count(reading.cells[tables.ROUNDS], tables.ROUNDS), drained, paused)

    async def drain_node(self, node: NodeId, drain: Drain | None) -> None:
        await self._write_for_rounds(tables.drained_cell(node), None if drain is None else drain.encode())

    async def pause(self, reason: str) -> None:
        await self._write_for_rounds(tables.PAUSED, reason.encode() or None, replaces=False)

    async def _write_for_rounds(self, cell: Cell, text: bytes | None, *, replaces: bool = True) -> None:
        """Writes what rounds read, so that none counts that was decided before. `replaces`: another text too."""

        def decide(reading: Reading) -> tuple[Writes, None]:
            there = reading.cells[cell]
            if there == text or (text is not None and there is not None and not replaces):
                return {}, None
            rounds = tables.read_count(reading.cells[tables.ROUNDS], tables.ROUNDS)
            return {cell: text, tables.ROUNDS: b"%d" % (rounds + 1)}, None

        await self._write((cell, tables.ROUNDS), decide)

    async def write_submissions(
        self,
        texts: Mapping[JobId, bytes | None],
        *,
        expected: Mapping[JobId, bytes | None],
        after_round: int | None = None,
    ) -> None:
        cells = {tables.submission_cell(job): text for job, text in texts.items()}

        def decide(reading: Reading) -> tuple[Writes, None]:
            writes: dict[Cell, bytes | None] = {
                cell: text for cell, text in cells.items() if reading.cells[cell] != text
            }
            stale = [cell.field for cell in writes if reading.cells[cell] != expected[JobId(cell.field)]]
            if stale:
                raise VersionConflict(f"the record of job {stale[0]} has changed: read it again")
            if after_round is None or not writes:
                return writes, None
            rounds = tables.read_count(reading.cells[tables.ROUNDS], tables.ROUNDS)
            if rounds != after_round:
                raise VersionConflict(f"round {rounds} has placed jobs, after round {after_round}: decide again")
            return writes | {tables.ROUNDS: b"%d" % (rounds + 1)}, None

        await self._write((*cells, tables.ROUNDS), decide)

    async def recall(self, job: JobId, command: CommandId) -> bytes | None:
        cell = Cell(f"commands:{job}", command)
        return (await self._read(cells=(cell,))).cells[cell]

    async def remember(self, job: JobId, command: CommandId, result: bytes) -> bytes:
        cell = Cell(f"commands:{job}", command)

        def decide(reading: Reading) -> tuple[Writes, bytes]:
            stored = reading.cells[cell]
            return ({cell: result}, result) if stored is None else ({}, stored)

        return await self._write((cell,), decide)

    async def forget_commands(self, job: JobId, *, keep: Collection[str]) -> None:
        table = f"commands:{job}"
        stored = (await self._read(tables=(table,))).tables[table]
        await self._remove([Cell(table, each) for each in stored if each.rpartition("/a")[0] not in keep])

    async def next_boot(self, job: JobId, instance: InstanceId) -> int:
        cell, term = tables.boot_cell(job, instance), self._attached().term

        def decide(reading: Reading) -> tuple[Writes, int]:
            boot = next_count(tables.read_count(reading.cells[cell], cell), term)
            return {cell: b"%d" % boot}, boot

        return await self._write((cell,), decide)

    async def _remove(self, cells: Sequence[Cell]) -> None:
        if cells:
            await self._write(tuple(cells), lambda _: (dict.fromkeys(cells), None))

    def _attached(self) -> Session:
        if self._session is None:
            raise StoreNotAdopted("this client has not attached to the store: call attach() first")
        return self._session

    async def _read(self, *, tables: tuple[str, ...] = (), cells: tuple[Cell, ...] = ()) -> Reading:
        session = self._attached()
        return await self._repeated(lambda: self._cells.read(session, tables=tables, cells=cells))

    async def _shorten(self, lease: Cell, *, longest_ms: int) -> None:
        """Let a lease end within this time. No clock but one that went back leaves a longer one."""

        def decide(reading: Reading) -> tuple[Writes, None]:
            until, latest_ms = reading.cells[lease], reading.now_unix_ms + longest_ms
            is_longer = until is not None and tables.read_count(until, lease) > latest_ms
            return ({lease: b"%d" % latest_ms} if is_longer else {}), None

        await self._write((lease,), decide)

    async def _write(self, cells: tuple[Cell, ...], decide: Callable[[Reading], tuple[Writes, T]]) -> T:
        session = self._attached()

        async def race() -> T:
            for _ in range(MAX_RACES):
                reading = await self._cells.read(session, cells=cells)
                writes, result = decide(reading)
                if not writes or await self._cells.swap(session, expected=reading.cells, writes=writes):
                    return result
            raise VersionConflict(
                f"{cells[0].table}/{cells[0].field} changed {MAX_RACES} times while it was being written: try again"
            )

        return await self._repeated(race)

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        for delay_s in RETRY_DELAYS_S:
            try:
                return await call()
            except StoreUnavailable:  # safe to repeat: every call decides anew from what it reads
                await asyncio.sleep(delay_s)
        return await call()

    async def _change_gpu(self, gpu: GpuId, change: Callable[[GpuRecord], GpuRecord]) -> GpuRecord:
        def decide(reading: Reading) -> tuple[Writes, GpuRecord]:
            record = tables.known_gpu(tables.read_gpus(reading), gpu)
            changed = change(record)
            return ({} if changed == record else tables.write_gpu(changed)), changed

        return await self._write((tables.gpu_cell(gpu),), decide)

    async def _change_transition(
        self, transition: Transition, step: Callable[[Transition, Mapping[GpuId, GpuRecord]], rules.Change]
    ) -> Transition:
        def decide(reading: Reading) -> tuple[Writes, Transition]:
            stored = tables.read_transition(reading, transition)
            if stored is None:
                raise UnknownTransition(f"job {transition.job} has no transition {transition.id}: plan it first")
            change = step(stored, tables.read_gpus(reading))
            if change.transition == stored:
                return {}, stored
            return {**tables.write_transition(change.transition), **tables.write_gpus(change.gpus)}, change.transition

        return await self._write(tables.transition_cells(transition), decide)


def next_count(last: int, term: int) -> int:
    """The next boot or epoch after `last`, which is 0 where the store has lost it."""
    return max(last, term * COUNTS_PER_TERM) + 1


def _closed_cells(job: JobId, known: Collection[TransitionId]) -> tuple[Cell, ...]:
    return tuple(tables.closed_cell(job, each) for each in sorted(known))


def _current(reading: Reading, job: JobId) -> tuple[Transition, ...]:
    closed = {cell.field: text for cell, text in reading.cells.items() if text is not None}
    return _of_job(job, tables.read_open(reading), closed)


def _of_job(job: JobId, opened: Iterable[Transition], closed: Mapping[str, bytes]) -> tuple[Transition, ...]:
    """The transitions of the job, by id. A closed one that cannot be read is left out, as one that the store has lost:
    the records of its GPUs tell what came of it."""
    found = list(opened)
    for name, text in closed.items():
        try:
            found.append(decode_transition(text))
        except ValueError as error:
            structlog.get_logger("store").warning("closed transition is damaged", transition=name, error=str(error))
    return tuple(sorted((each for each in found if each.job == job), key=lambda each: each.id))
