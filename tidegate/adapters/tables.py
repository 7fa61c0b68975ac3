"""Which cell holds which value of the store, and in what encoding. Pure.

Tables:
- `store`: the run id and the term of the last adoption, which only an adoption and a shutting write;
- `gpus`: the ownership map;
- `open`: the open transitions of all jobs;
- `closed:<job>`: the last closed transitions of a job;
- `states`: one state for each job;
- `submissions`: one text for each job of the cluster;
- `configs:<job>`: the configs of a job that was submitted, each under its digest;
- `cluster`: the number of rounds that have placed jobs;
- `drained`: a cell for each node of the cluster that gets no jobs;
- `leads:<job>`, `leases:<job>`, `commands:<job>`, `boots:<job>`.

A transition is in exactly one of `open` and `closed:<job>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TypeVar

from tidegate.adapters.cells import Cell, Reading, Writes
from tidegate.json_text import parse_json, typed, whole_number
from tidegate.ownership.records import (
    GpuRecord,
    StoreDamaged,
    Transition,
    UnknownGpu,
    decode_gpu,
    decode_transition,
    encode_gpu,
    encode_transition,
)
from tidegate.ports.store import Identity, JobState, LeadRecord
from tidegate.types import LARGEST_TERM, Drain, GpuId, InstanceId, JobId, NodeId, Role, TransitionId

T = TypeVar("T")

RUN_ID, TERM = Cell("store", "run_id"), Cell("store", "term")
_COUNT = re.compile(rb"[0-9]{1,18}")
_TERM = re.compile(rb"0|[1-9][0-9]{0,11}")
"""One text for each term up to `LARGEST_TERM`: the guard compares texts."""
_HEAD = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})\n")
RESIGNED = 0
"""The value of `expires_unix_ms` after a lead resigned. The record stays, because it holds the epoch."""


def gpu_cell(gpu: GpuId) -> Cell:
    return Cell("gpus", gpu)


def state_cell(job: JobId) -> Cell:
    return Cell("states", job)


ROUNDS = Cell("cluster", "rounds")


PAUSED = Cell("cluster", "paused")


def drained_cell(node: NodeId) -> Cell:
    return Cell("drained", node)


def read_drain(text: bytes, node: str) -> Drain:
    """StoreDamaged."""
    if text == b"1":  # of an earlier release
        return Drain.LEAVE
    try:
        return Drain(text.decode())
    except ValueError as error:
        raise StoreDamaged(f"the store has {text!r} as the drain of node {node}: drain it anew") from error


def configs_of(job: JobId) -> str:
    """The table of a submitted job's configs."""
    return f"configs:{job}"


def submission_cell(job: JobId) -> Cell:
    return Cell("submissions", job)


def lead_cell(job: JobId, role: Role) -> Cell:
    return Cell(f"leads:{job}", role)


def leases_of(job: JobId) -> str:
    """The table of a job's leases."""
    return f"leases:{job}"


def lease_cell(job: JobId, holder: InstanceId) -> Cell:
    return Cell(leases_of(job), holder)


def boots_of(job: JobId) -> str:
    """The table of the boots of a job's instances."""
    return f"boots:{job}"


def boot_cell(job: JobId, instance: InstanceId) -> Cell:
    return Cell(boots_of(job), instance)


def tables_of(job: JobId) -> tuple[str, ...]:
    """The tables that are of one job alone."""
    return (leases_of(job), boots_of(job), *(f"{kind}:{job}" for kind in ("leads", "closed", "commands")))


def open_cell(transition: Transition) -> Cell:
    return Cell("open", transition.id)


def closed_cell(job: JobId, transition: TransitionId) -> Cell:
    return Cell(f"closed:{job}", transition)


def transition_cells(transition: Transition) -> tuple[Cell, ...]:
    gpus = tuple(gpu_cell(move.gpu) for move in transition.moves)
    return (open_cell(transition), closed_cell(transition.job, transition.id), *gpus)


def read_as(decode: Callable[[bytes], T], found: bytes, cell: Cell) -> T:
    """The value in a cell. StoreDamaged: the cell holds something else."""
    try:
        return decode(found)
    except ValueError as error:
        raise damaged(f"the store's field '{cell.field}' of {cell.table} is damaged: {error}") from error


def damaged(fault: str) -> StoreDamaged:
    """The fault, with its remedy."""
    return StoreDamaged(
        f"{fault}; end the job, remove the data of its stores (embedded: tidegate prune JOB --resumable --yes), and go "
        "on from its checkpoint with --resume"
    )


def read_identity(run_id: str, adopted_run_id: bytes, term: bytes) -> Identity:
    """The identity of the server `run_id`, by its cells of the last adoption. StoreDamaged: they have none."""
    adopted = read_as(bytes.decode, adopted_run_id, RUN_ID)
    return Identity(run_id, adopted or None, read_as(_decode_term, term, TERM))


def _decode_term(found: bytes) -> int:
    if not _TERM.fullmatch(found):
        raise ValueError(f"not a term: {found[:60]!r}; it must be a whole number from 0 to {LARGEST_TERM}")
    return int(found)


def read_transition(reading: Reading, transition: Transition) -> Transition | None:
    for cell in (open_cell(transition), closed_cell(transition.job, transition.id)):
        if found := reading.cells[cell]:
            return read_as(decode_transition, found, cell)
    return None


def read_open(reading: Reading) -> list[Transition]:
    opened = reading.tables["open"].items()
    return [read_as(decode_transition, found, Cell("open", name)) for name, found in opened]


def read_gpus(reading: Reading) -> dict[GpuId, GpuRecord]:
    """Those of the cells and of the table that were read, in order of name."""
    found = {cell: each for cell, each in reading.cells.items() if cell.table == "gpus" and each is not None}
    found.update({gpu_cell(GpuId(name)): each for name, each in reading.tables.get("gpus", {}).items()})
    records = [read_as(decode_gpu, each, cell) for cell, each in found.items()]
    return {record.gpu: record for record in sorted(records, key=lambda each: each.gpu)}


def known_gpu(gpus: Mapping[GpuId, GpuRecord], gpu: GpuId) -> GpuRecord:
    if gpu not in gpus:
        raise UnknownGpu(f"GPU {gpu} is not registered, or not part of this transition: register it first")
    return gpus[gpu]


def read_job_state(reading: Reading, job: JobId) -> JobState | None:
    cell = state_cell(job)
    found = reading.cells[cell]
    return None if found is None else read_as(_decode_job_state, found, cell)


def _decode_job_state(found: bytes) -> JobState:
    head = _HEAD.match(found)
    if head is None:
        raise ValueError(f"not a job's state: {found[:60]!r}; it must begin with its number of writes and its version")
    return JobState(found[head.end() :], int(head[1]), int(head[2]))


def encode_job_state(state: JobState) -> bytes:
    return b"%d %d\n%b" % (state.write, state.version, state.payload)


def read_lead(reading: Reading, cell: Cell) -> LeadRecord | None:
    found = reading.cells[cell]
    return None if found is None else read_as(_decode_lead, found, cell)


def _decode_lead(found: bytes) -> LeadRecord:
    try:
        fields = parse_json(found)
        return LeadRecord(
            job=JobId(typed(str, fields["job"], "job")),
            role=Role(fields["role"]),
            instance=InstanceId(typed(str, fields["instance"], "instance")),
            endpoint=typed(str, fields["endpoint"], "endpoint"),
            epoch=whole_number(fields["epoch"], "epoch"),
            expires_unix_ms=whole_number(fields["expires_unix_ms"], "expires_unix_ms"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a lead's record: {found[:200]!r} ({error})") from error


def read_count(found: bytes | None, cell: Cell) -> int:
    """The number in a cell; 0 for an empty one. StoreDamaged: the cell holds something else."""
    return 0 if found is None else read_as(_decode_count, found, cell)


def _decode_count(found: bytes) -> int:
    if not _COUNT.fullmatch(found):
        raise ValueError(f"not a number: {found[:60]!r}")
    return int(found)


def encode_lead(lead: LeadRecord) -> bytes:
    return json.dumps(asdict(lead), sort_keys=True, separators=(",", ":")).encode()


def write_gpu(record: GpuRecord) -> Writes:
    return {gpu_cell(record.gpu): encode_gpu(record)}


def write_gpus(records: tuple[GpuRecord, ...]) -> Writes:
    return {gpu_cell(record.gpu): encode_gpu(record) for record in records}


def write_transition(transition: Transition) -> Writes:
    encoded = encode_transition(transition)
    if transition.is_open:
        return {open_cell(transition): encoded}
    return {open_cell(transition): None, closed_cell(transition.job, transition.id): encoded}
