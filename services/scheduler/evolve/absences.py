"""Records since when GPUs of the job are absent: lost, or free on a node without a living instance. Pure.

Events carry no time, so an absence begins with a decision and ends with an event:
1. A decision notes the absent GPUs that it finds (`noted`), from the policy's first choice in the job on.
2. An event removes an absence that is over (`still`). The holder or the gate reports that nobody holds the GPU, or the
   store gives the GPU out under another token, or an instance joins on the node of a free GPU.
3. If an instance joins on the node of a lost GPU, and no instance lived there before, the wait begins anew: the
   instance can query the gate, and the holder gets the command to end. This happens once per token. Otherwise a node
   whose services start again and again would keep the job waiting forever.

Invariants:
- An absence lasts whatever happens to the questions about it, because a node without a living instance cannot answer.
  [test_absences: question_nor_its_answer_changes]
- A job that ends waits for no GPU. [test_absences: after_the_job_nothing_is_absent]
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
"""After this time the job goes on without the GPU. It is three default leases, and eight questions to a gate.

Shorter: a worker that ends slowly, or a service that restarts, costs its component a start on other GPUs, and another
start when the GPU is back. Longer: a component that needs the GPU stands still for longer."""


def noted(state: ClusterState, now_ms: int) -> ClusterState:
    """The state with the GPUs that are absent now, and with the mark on those that are absent for long."""
    found = {each.gpu: _absence(state.absent.get(each.gpu), each, now_ms) for each in _missing(state)}
    return state if found == state.absent else replace(state, absent=dict(sorted(found.items())))


def still(state: ClusterState, before: ClusterState) -> ClusterState:
    """The state without the absences that ended since `before`."""
    if not state.absent:
        return state
    nodes = {node_of(gpu) for gpu in state.absent}
    nodes_back = {node for node in nodes if state.living(node=node) and not before.living(node=node)}
    found = {
        gpu: Absence(absence.token, None, is_anew=True)
        if node_of(gpu) in nodes_back and not absence.is_anew
        else absence
        for gpu, absence in state.absent.items()
        if lasts(state, gpu, absence)
    }
    return state if found == state.absent else replace(state, absent=found)


def next_due_ms(state: ClusterState) -> Iterable[int]:
    """The time when each shorter absence becomes long."""
    waits = (absence.since_ms for absence in state.absent.values() if not absence.is_long)
    return (since_ms + LONG_MS for since_ms in waits if since_ms is not None)


def _absence(known: Absence | None, record: GpuRecord, now_ms: int) -> Absence:
    if known is None or known.token != record.token:
        known = Absence(record.token, now_ms)
    since_ms = now_ms if known.since_ms is None else known.since_ms
    # Avoid a second wait when the store's clock steps back: a long absence stays long.
    return replace(known, since_ms=since_ms, is_long=known.is_long or now_ms - since_ms >= LONG_MS)


def _missing(state: ClusterState) -> list[GpuRecord]:
    if state.spec is None or not is_waited_for(state):
        return []
    owned = GpuState.OWNED
    # Nearly all of a thousand GPUs are owned, so the code below looks at the others alone.
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
