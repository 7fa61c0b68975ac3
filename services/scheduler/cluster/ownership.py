"""Sets GPUs free that jobs left behind: those of jobs that have no place any more, once their gates are free.

A job that ends in order gives its GPUs back itself. One that was killed leaves them owned, and transitions open.

Invariants:
- Nothing of a job with a place is touched. [test_cluster_loop: of_a_placed_job_is_touched]
- A GPU that a process holds stays as it is. [test_cluster_loop: that_a_process_holds]
- Nor is one touched whose gate is not known. [test_cluster_loop: whose_machine_is_away]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tidegate.ownership.records import GateState, GpuState
from tidegate.ownership.transitions import earned_outcome
from tidegate.ports.store import Store
from tidegate.types import GpuId, JobId, NodeId, node_of


async def freed(
    store: Store,
    *,
    placed: Mapping[JobId, Collection[GpuId]],
    gates: Mapping[GpuId, GateState],
    away: Collection[NodeId] = (),
) -> frozenset[GpuId]:
    """The GPUs that nobody owns or holds, after those that were left behind were set free. `placed`: the jobs that have
    a place, with its GPUs. `away`: the nodes whose gates are not known, so that none of theirs is free."""
    contents = await store.contents()
    left_open = [transition for transition in contents.transitions if transition.job not in placed]
    for transition in left_open:
        await store.close(transition, earned_outcome(transition))
    records = await store.gpus() if left_open else {record.gpu: record for record in contents.gpus}
    held = {gpu for gpu, state in gates.items() if state.held}
    held.update(gpu for gpu in records if node_of(gpu) in away)
    for gpu, record in records.items():
        has_it = record.owner is not None and gpu in placed.get(record.owner.job, ())
        if gpu in held or has_it or record.transition is not None:
            continue
        if record.state is GpuState.OWNED:
            record = await store.mark_lost(gpu, record.token)
        if record.state is GpuState.LOST:
            records[gpu] = await store.reclaim(gpu, record.token)
    return frozenset(gpu for gpu, each in records.items() if each.state is GpuState.FREE and gpu not in held)
