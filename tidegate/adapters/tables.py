"""Which cell holds which value of the store, and in what encoding. Pure.

Tables:
- `gpus`: the ownership map;
- `open`: the open transitions of all jobs;
- `closed:<job>`: the last closed transitions of a job;
- `states`: one state for each job;
- `leads:<job>`, `leases`, `commands:<job>`, `boots`.

A transition is in exactly one of `open` and `closed:<job>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from tidegate.adapters.cells import Cell, Reading, Writes
from tidegate.ownership.records import (
    GpuRecord,
    Transition,
    UnknownGpu,
    decode_gpu,
    decode_transition,
    encode_gpu,
    encode_transition,
)
from tidegate.ports.store import JobState, LeadRecord
from tidegate.types import GpuId, JobId, Role, TransitionId

RESIGNED = 0
"""The value of `expires_unix_ms` after a lead resigned. The record stays, because it holds the epoch."""


def gpu_cell(gpu: GpuId) -> Cell:
    return Cell("gpus", gpu)


def state_cell(job: JobId) -> Cell:
    return Cell("states", job)


def lead_cell(job: JobId, role: Role) -> Cell:
    return Cell(f"leads:{job}", role)


def open_cell(transition: Transition) -> Cell:
    return Cell("open", transition.id)


def closed_cell(job: JobId, transition: TransitionId) -> Cell:
    return Cell(f"closed:{job}", transition)


def transition_cells(transition: Transition) -> tuple[Cell, ...]:
    gpus = tuple(gpu_cell(move.gpu) for move in transition.moves)
    return (open_cell(transition), closed_cell(transition.job, transition.id), *gpus)


def read_transition(reading: Reading, transition: Transition) -> Transition | None:
    found = reading.cells[open_cell(transition)] or reading.cells[closed_cell(transition.job, transition.id)]
    return None if found is None else decode_transition(found)


def read_gpus(reading: Reading) -> dict[GpuId, GpuRecord]:
    found = [decode_gpu(each) for cell, each in reading.cells.items() if cell.table == "gpus" and each is not None]
    return {record.gpu: record for record in found}


def known_gpu(gpus: Mapping[GpuId, GpuRecord], gpu: GpuId) -> GpuRecord:
    if gpu not in gpus:
        raise UnknownGpu(f"GPU {gpu} is not registered, or not part of this transition: register it first")
    return gpus[gpu]


def read_job_state(reading: Reading, job: JobId) -> JobState | None:
    found = reading.cells[state_cell(job)]
    if found is None:
        return None
    counts, payload = found.split(b"\n", 1)
    write, version = counts.split(b" ")
    return JobState(payload, int(write), int(version))


def encode_job_state(state: JobState) -> bytes:
    return b"%d %d\n%b" % (state.write, state.version, state.payload)


def read_lead(found: bytes | None) -> LeadRecord | None:
    if found is None:
        return None
    fields = json.loads(found)
    return LeadRecord(**{**fields, "role": Role(fields["role"])})


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
