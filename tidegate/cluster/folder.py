"""The folder of a cluster on this machine: `<folder of the jobs' folders>/.cluster`. Its files are this user's alone.

    cluster.json     what the cluster is; it is there while the cluster is up, once everybody can use it
    endpoint.json    the address of its Cluster API, and the credential for it
    agent.lock       held by the agent, with its pid
    servers/         the data of NATS and Redis: the queue outlasts a restart
    gates/           the gates of the nodes
    jobs/            of each job: the config of its last start, how that ended, and which submission removed an earlier
                     run's files
    logs/            of the agent, the scheduler and the jobs' launchers

Keys are in host memory alone (`tidegate.cluster.credentials`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tidegate.cluster.slots import Slots
from tidegate.json_text import parse_json, typed
from tidegate.types import JobId

NAME = ".cluster"


@dataclass(frozen=True, slots=True)
class ClusterFolder:
    root: Path

    @classmethod
    def of(cls, output_dir: Path) -> ClusterFolder:
        """The cluster whose jobs have their folders in `output_dir`."""
        return cls(output_dir.resolve() / NAME)

    @property
    def description(self) -> Path:
        return self.root / "cluster.json"

    @property
    def endpoint(self) -> Path:
        return self.root / "endpoint.json"

    @property
    def lock(self) -> Path:
        return self.root / "agent.lock"

    @property
    def servers(self) -> Path:
        return self.root / "servers"

    @property
    def gates(self) -> Path:
        return self.root / "gates"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def job_config(self, job: JobId) -> Path:
        return self.root / "jobs" / f"{job}.json"

    def job_end(self, job: JobId) -> Path:
        return self.root / "jobs" / f"{job}.end.json"

    def job_forced(self, job: JobId) -> Path:
        return self.root / "jobs" / f"{job}.forced"

    def host_memory(self, root: Path) -> Path:
        """The cluster's own folder in host memory. It is the same at every start."""
        digest = hashlib.blake2b(str(self.root).encode(), digest_size=5).hexdigest()
        return root / f"tidegate-cluster-{os.getuid()}-{digest}"


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """What the processes of a cluster have to know. `credentials`: the folder of `tidegate.cluster.credentials`."""

    slots: Slots
    nats_url: str
    redis_url: str
    agent: str
    credentials: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> ClusterDescription:
        """ValueError."""
        fields = typed(dict, parse_json(text), "a cluster's description")
        try:
            slots = Slots.of(typed(dict, fields["slots"], "slots"))
            texts = {name: typed(str, fields[name], name) for name in ("nats_url", "redis_url", "agent", "credentials")}
        except KeyError as error:
            raise ValueError(f"a cluster's description has no {error}") from error
        return cls(slots, **texts)
