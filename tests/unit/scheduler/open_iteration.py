"""A job whose first iteration is open."""

from __future__ import annotations

from services.scheduler.state.cluster_state import ClusterState
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import spec
from tidegate.types import Role


def iterating(*, keeps_state: bool = True, **settings: int) -> Drive:
    """A job whose components have all taken the first iteration. No event waits to be delivered."""
    job = spec(**settings)  # type: ignore[arg-type]  # only numbers are varied here
    drive = booted(FakeCluster(job, keeps_state=keeps_state))
    drive.run_until(is_iterating)
    deliver_all(drive)
    return drive


def deliver_all(drive: Drive) -> None:
    while drive.cluster.outbox:
        drive.step()


def is_iterating(state: ClusterState) -> bool:
    return state.iteration is not None and len(state.iteration.opened) == len(Role)
