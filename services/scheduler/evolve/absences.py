"""Since when GPUs of the job cannot be had: lost, or free on a node of which no instance lives. Pure.

Events tell no time. So a decision writes down what it finds (`noted`), from the policy's first choice in the job on,
and what an event ends is forgotten with it (`still`): a holder or a gate says that nobody holds the GPU, the store
hands it out under another token, an instance joins on the node of a free one. Where none lived it can ask the gate of a
lost one, and who still holds that is asked to end: its wait begins anew, once under a token, for a node whose services
start over and over again would keep the job waiting without end.

Invariants: an absence is kept for as long as it lasts, whatever becomes of what was asked, for on a node of which no
instance lives nobody can be asked; a job that ends waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.state.absent import is_lost, is_waited_for, lasts
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Absence, node_of_instance
from tidegate.ownership.records import GpuRecord, GpuState
from tidegate.types import node_of

LONG_MS = 60_000
"""Three default leases, and eight questions to a gate. Shorter, and a worker that takes its time to end, or a service
that starts again, costs its component a start on other GPUs, and another one when the GPU is back; longer, and a
component that cannot do without it stands still for longer."""


def noted(state: ClusterState, now_ms: int) -> ClusterState:
    """The state that says what is absent, and which of it for long."""
    found = {each.gpu: _absence(state.absent.get(each.gpu), each, now_ms) for each in _missing(state)}
    return state if found == state.absent else replace(state, absent=dict(sorted(found.items())))


def still(state: ClusterState, before: ClusterState) -> ClusterState:
    """Without what is over since `before`."""
    if not state.absent:
        return state
    nodes = {node_of(gpu) for gpu in state.absent}
    heard_of = {node for node in nodes if state.living(node=node) and not before.living(node=node)}
    found = {
        gpu: Absence(absence.token, None, is_anew=True) if node_of(gpu) in heard_of and not absence.is_anew else absence
        for gpu, absence in state.absent.items()
        if lasts(state, gpu, absence)
    }
    return state if found == state.absent else replace(state, absent=found)


def next_due_ms(state: ClusterState) -> Iterable[int]:
    """When each absence that is not long yet will be."""
    waits = (absence.since_ms for absence in state.absent.values() if not absence.is_long)
    return (since_ms + LONG_MS for since_ms in waits if since_ms is not None)


def _absence(known: Absence | None, record: GpuRecord, now_ms: int) -> Absence:
    if known is None or known.token != record.token:
        known = Absence(record.token, now_ms)
    since_ms = now_ms if known.since_ms is None else known.since_ms
    # The store's clock may step back: what was gone without is not waited for again.
    return replace(known, since_ms=since_ms, is_long=known.is_long or now_ms - since_ms >= LONG_MS)


def _missing(state: ClusterState) -> list[GpuRecord]:
    if state.spec is None or not is_waited_for(state):
        return []
    owned = GpuState.OWNED
    # Of a thousand GPUs nearly all: the others alone are looked at.
    others = [record for record in state.gpus.values() if record.state is not owned]
    if not others:
        return []
    own, alive = set(state.spec.gpus), {node_of_instance(name) for name in state.living()}
    is_ours = [record.gpu in own if record.owner is None else record.owner.job == state.job for record in others]
    return [
        record
        for record, is_own in zip(others, is_ours, strict=True)
        if is_own and (is_lost(state, record) or (record.state is GpuState.FREE and node_of(record.gpu) not in alive))
    ]
