"""A store that comes back empty, or as it was at an earlier time."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.evolve.recovering import recovered
from services.scheduler.state.cluster_state import ClusterState
from tests.unit.scheduler.drive import Drive
from tests.unit.scheduler.fake_parts import JOB, NODES
from tidegate.ownership.adoption import rebuild
from tidegate.ownership.records import GateState, GpuRecord, Transition
from tidegate.ports.store import StoreContents
from tidegate.types import GpuId, Role, Token, TransitionId, node_of


@dataclass
class Saved:
    """The store and the state at an earlier time, and how many events were delivered by then."""

    gpus: dict[GpuId, GpuRecord]
    records: dict[TransitionId, Transition]
    state: ClusterState
    num_delivered: int


def lose_store(drive: Drive, saved: Saved | None, *, is_empty: bool = False) -> None:
    """The store comes back empty, or as it was saved. `is_empty`: only the state was saved, elsewhere."""
    cluster, store = drive.cluster, drive.cluster.store
    contents = StoreContents((), ())
    if saved is not None and not is_empty:
        opened = [each for each in saved.records.values() if each.is_open]
        contents = StoreContents(tuple(saved.gpus.values()), tuple(opened))
    reports = {
        node: [
            GateState(slot, gate.highest, gate.is_held)
            for slot, gate in cluster.gates.items()
            if node_of(slot) == node and gate.highest > Token(0, 0)
        ]
        for node in NODES
    }
    rebuilt = rebuild(contents, reports)
    store.term += 1
    store.gpus = {record.gpu: record for record in rebuilt.gpus}
    store.records = {each.id: each for each in rebuilt.transitions}
    store.register(cluster.job_spec.gpus)
    cluster.answers.clear()
    before = saved.state if saved is not None else ClusterState(job=JOB)
    missed = drive.delivered[saved.num_delivered if saved is not None else 0 :]
    drive.state = recovered(before, missed) if missed else before
    store.saved_version = drive.state.version
    for instance in cluster.instances.values():
        # Its lease is gone: it joins again.
        instance.has_lease = instance.has_lease and not instance.is_alive
    for role in Role:
        cluster.move_lead(role)
    cluster.renew()
