"""Stores that come back empty, or as they were at an earlier time: the store of the job's state, the streams, or both.

- Without the store the job goes on: ownership is rebuilt from the gates under a larger term, and the state from the
  events, or from a copy of it and the events since.
- Without the streams the launcher stops everything. A person resumes the job: the streams are new, every instance
  starts again, and the launcher reports the newest checkpoint and submits the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.evolve.recovering import recovered
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from simulator.voice import LAUNCHER
from tests.unit.scheduler.drive import Drive
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB
from tidegate.checkpoint_names import place_of
from tidegate.ownership.records import GpuRecord, Transition
from tidegate.types import GpuId, InstanceId, Role, TransitionId


@dataclass
class Saved:
    """The store and the state at an earlier time, and how many events of which stream were delivered by then. By
    default all are empty. `register_term` is the bus's."""

    state: ClusterState = field(default_factory=lambda: ClusterState(job=JOB))
    num_delivered: int = 0
    num_streams: int = 0
    gpus: dict[GpuId, GpuRecord] = field(default_factory=dict)
    records: dict[TransitionId, Transition] = field(default_factory=dict)
    term: int = 0
    boots: dict[InstanceId, int] = field(default_factory=dict)
    epochs: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    answers: dict[str, tuple[bool, str]] = field(default_factory=dict)
    register_term: int = 0

    def put_into(self, cluster: FakeCluster) -> None:
        cluster.store.gpus, cluster.store.records = dict(self.gpus), dict(self.records)
        cluster.store.term = self.term
        cluster.boots, cluster.epochs, cluster.answers = dict(self.boots), dict(self.epochs), dict(self.answers)


def saved_now(drive: Drive) -> Saved:
    cluster, store = drive.cluster, drive.cluster.store
    return Saved(
        drive.state,
        len(drive.delivered),
        drive.num_streams,
        dict(store.gpus),
        dict(store.records),
        store.term,
        dict(cluster.boots),
        dict(cluster.epochs),
        dict(cluster.answers),
        cluster.register_term,
    )


def lose_store(drive: Drive, saved: Saved | None, *, is_empty: bool = False, begins_late: bool = False) -> None:
    """The store comes back empty, or as it was saved. `is_empty`: only the state was saved, on the stream.
    `begins_late`: leads begin what they had taken before only after the gates have been asked."""
    cluster, saved = drive.cluster, saved or Saved()
    is_of_stream = saved.num_streams == drive.num_streams
    (Saved() if is_empty else saved).put_into(cluster)
    cluster.adopt(drive.state)
    before = saved.state if is_of_stream or not is_empty else ClusterState(job=JOB)
    missed = drive.delivered[saved.num_delivered if is_of_stream else 0 :]
    drive.lacks_accounts |= drive.num_streams > 1 and not is_of_stream
    drive.state = recovered(before, missed) if missed else before
    cluster.store.saved_version = drive.state.version
    if begins_late:
        cluster.begin_late()
    cluster.late.clear()
    for instance in cluster.instances.values():
        # Its lease is gone: it joins again.
        instance.has_lease = instance.has_lease and not instance.is_alive
    for role in Role:
        cluster.move_lead(role)
    cluster.renew()


def lose_stream(drive: Drive, number: int, *, register_term: int = 0, store: Saved | None = None) -> None:
    """The streams are lost, and the term register is empty or as it was. `store`: so the store comes back too.

    `number` tells how far the scheduler and the leads come before the launcher sees it, and whether the store starts
    again. The launcher submits the job before it starts the instances."""
    cluster, voice = drive.cluster, drive.cluster.voice
    # A state that was made again may have superseded an iteration whose checkpoint it learns of only now.
    drive.lacks_accounts |= cluster.store.term > 1
    for _ in range(number % 4):
        cluster.outbox.clear()
        cluster.work()
        drive.decide()
    cluster.stop()
    found = max(cluster.checkpoints, key=_place_of, default=None)
    known = [*(each.incarnation for each in drive.delivered), *(each for each, _ in cluster.journal)]
    incarnation = 1 + max([0, *known, _place_of(found)[0] if found else 0])
    drive.delivered.clear()
    drive.num_streams += 1
    cluster.handed_on.clear()
    cluster.register_term = register_term
    if store is not None:
        store.put_into(cluster)
        drive.state, drive.lacks_accounts = store.state, True
        cluster.store.saved_version = drive.state.version
    if store is not None or number // 4 % 2:
        # No instance is known from the new stream, so that no gate is asked.
        cluster.adopt(ClusterState(job=JOB))
    else:
        # The store stayed open, and the scheduler tells the bus its term.
        cluster.register_term = max(cluster.register_term, cluster.store.term)
    voice.boots[LAUNCHER] = drive.launcher_boot = voice.boots.get(LAUNCHER, 1) + 1
    if found is not None:
        next_iteration = cluster.checkpoints[found]
        voice.say(LAUNCHER, ev.CheckpointSaved(next_iteration, next_iteration, found, 0), incarnation=incarnation)
    voice.say(LAUNCHER, ev.JobSubmitted(cluster.job_spec, "{}", resume=True), incarnation=incarnation)
    while cluster.outbox:
        drive.deliver(cluster.outbox.pop(0))
    for name in sorted(cluster.instances):
        cluster.start(name)


def _place_of(checkpoint: str) -> tuple[int, int]:
    place = place_of(checkpoint)
    assert place is not None
    return place
