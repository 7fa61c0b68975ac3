"""Whether a GPU is absent: the job waits for it, and it is lost, or free on a node without a living instance. Pure."""

from __future__ import annotations

from services.scheduler.state.cluster_state import OVER, ClusterState
from services.scheduler.state.components import Absence
from tidegate.ownership.records import GpuRecord, GpuState
from tidegate.types import GpuId, Grant, node_of


def lasts(state: ClusterState, gpu: GpuId, absence: Absence) -> bool:
    """Whether the GPU is still absent under the same token, and the job still waits for it."""
    record = state.gpus.get(gpu)
    if record is None or record.token != absence.token or not is_waited_for(state):
        return False
    if record.state is GpuState.FREE:
        return not state.living(node=node_of(gpu))
    return is_lost(state, record)


def is_waited_for(state: ClusterState) -> bool:
    return state.spec is not None and state.phase not in OVER and state.remembered.assignment is not None


def is_lost(state: ClusterState, record: GpuRecord) -> bool:
    return record.state is GpuState.LOST and Grant(record.gpu, record.token) not in state.released
