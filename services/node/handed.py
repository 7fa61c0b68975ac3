"""What an agent leaves for the program that takes its place (`tidegate.runtime.handover`).

Invariant: what is written is what is read. [test_handed: is_what_was_left]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.node.jobs import Start
from tidegate.cluster.keepers import Term
from tidegate.runtime.cuda import CudaDevice
from tidegate.runtime.embedded import RunningServers
from tidegate.runtime.handover import kept
from tidegate.runtime.processes import ServiceEnd, Watched
from tidegate.types import JobId


@dataclass(frozen=True, slots=True)
class ClusterLeft:
    """What the agent of a cluster leaves. `term`: whose turn it is, where several machines may keep it. `listeners`: of
    the fronts of NATS and Redis, if there are any. `ends`: those that nobody has noted. `fork_servers`: by job, the
    service that forks its workers. `devices`: those of this machine, once they are found."""

    term: Term | None
    servers: RunningServers
    listeners: tuple[int, ...]
    services: tuple[Watched, ...]
    ends: tuple[ServiceEnd, ...]
    starts: Mapping[JobId, Start]
    fork_servers: Mapping[JobId, str]
    devices: tuple[CudaDevice, ...] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.servers.lock_fd, *self.listeners)

    def to_json(self) -> dict[str, Any]:
        return {
            "term": None if self.term is None else asdict(self.term),
            "servers": asdict(self.servers),
            "listeners": self.listeners,
            "services": [each.to_json() for each in self.services],
            "ends": [asdict(each) for each in self.ends],
            "starts": {job: start.to_json() for job, start in self.starts.items()},
            "fork_servers": dict(self.fork_servers),
            "devices": [asdict(each) for each in self.devices],
        }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ClusterLeft:
        servers, term = fields["servers"], fields["term"]
        return cls(
            None if term is None else Term(**term),
            RunningServers(kept(servers["lock_fd"]), tuple(servers["nats"]), tuple(servers["store"])),
            tuple(map(kept, fields["listeners"])),
            tuple(map(Watched.of, fields["services"])),
            tuple(ServiceEnd(**each) for each in fields["ends"]),
            {JobId(job): Start.of(start) for job, start in fields["starts"].items()},
            {JobId(job): name for job, name in fields["fork_servers"].items()},
            tuple(CudaDevice(**each) for each in fields["devices"]),
        )


@dataclass(frozen=True, slots=True)
class Left:
    """`root`: the cluster's folder. `cluster`: None where it stands by."""

    root: Path
    lock_fd: int
    cluster: ClusterLeft | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.lock_fd, *(self.cluster.descriptors if self.cluster else ()))

    def to_json(self) -> dict[str, Any]:
        cluster = None if self.cluster is None else self.cluster.to_json()
        return {"root": str(self.root), "lock_fd": self.lock_fd, "cluster": cluster}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Left:
        cluster = fields["cluster"]
        return cls(Path(fields["root"]), kept(fields["lock_fd"]), None if cluster is None else ClusterLeft.of(cluster))
