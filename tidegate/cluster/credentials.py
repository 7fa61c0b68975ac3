"""The credentials of a cluster whose processes all run on this machine, as this user.

They are in the cluster's folder in host memory, as long as the cluster is up: no key is ever on a disk.

    authority/           of the agent, who issues credentials to jobs
    scheduler/           of the cluster's schedulers
    operator/            of this user's commands
    node/                of the agent and of the embedded servers
    jobs/<job>/          scheduler/ and job/, with which the job's processes come to NATS and Redis

Each start of a job issues its own for what its processes say to each other (`tidegate.certs.job_credentials`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.certs.authority import MOST_DAYS, Authority
from tidegate.certs.identity import Identity, Party
from tidegate.certs.job_credentials import CLUSTER, OPERATOR, SCHEDULER, job_identity
from tidegate.types import LOOPBACK, JobId

AGENT = Identity(CLUSTER, Party.NODE, "agent")
_JOBS_SCHEDULER = "scheduler-of-"


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    root: Path

    @classmethod
    def issue(cls, root: Path, *, address: str = LOOPBACK) -> ClusterCredentials:
        """Makes an authority and the cluster's credentials in an empty folder. `address`: where other machines reach
        the servers. OSError."""
        found = cls(root)
        authority = Authority.create(found.root / "authority", CLUSTER)
        for identity in (SCHEDULER, OPERATOR, AGENT):
            addresses = [*dict.fromkeys([LOOPBACK, address])] if identity is AGENT else []
            authority.issue(identity, found.of(identity.party), addresses=addresses, days=MOST_DAYS)
        return found

    def pair_of_job(self, job: JobId) -> tuple[Path, Path]:
        """The folders of those that `issue_to_job` makes."""
        return self.of_job(job) / Party.SCHEDULER, self.of_job(job) / Party.JOB

    def of(self, party: Party) -> Path:
        return self.root / party

    def of_job(self, job: JobId) -> Path:
        """The folder of a job's two."""
        return self.root / "jobs" / job

    def issue_to_job(self, job: JobId) -> tuple[Path, Path]:
        """New ones for what a job's scheduler and the others of its processes do on NATS and in Redis. OSError."""
        authority, folder = Authority.load(self.root / "authority"), self.of_job(job)
        own = Identity(CLUSTER, Party.SCHEDULER, f"{_JOBS_SCHEDULER}{job}")
        for identity in (own, job_identity(job)):
            authority.issue(identity, folder / identity.party, days=MOST_DAYS)
        return self.pair_of_job(job)
