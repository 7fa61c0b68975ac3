"""The credentials of a job whose processes all run on this machine, as this user.

They last as long as the job's folder in host memory: no key is ever on a disk. The authority is thrown away as soon as
they are issued, so nobody can issue another one.

    credentials/scheduler    of the scheduler, and of the launcher, who opens the job
    credentials/job          of all processes of the components
    credentials/operator     of this user's commands
    credentials/node         of the embedded servers
    credentials/nats, redis  scheduler/ and job/ for these, where they travel to other machines

Invariants:
- Who has none of them gets no answer from the job. [test_job: without_its_credential]
- The authority's key is gone once they are issued. [test_job_credentials: nobody_can_issue_another]
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tidegate.certs.authority import MOST_DAYS, Authority
from tidegate.certs.identity import Identity, Party
from tidegate.types import LOOPBACK, JobId

CLUSTER = "local"
SCHEDULER = Identity(CLUSTER, Party.SCHEDULER, "scheduler")
OPERATOR = Identity(CLUSTER, Party.OPERATOR, "user")
SERVERS = Identity(CLUSTER, Party.NODE, "servers")


def job_identity(job: JobId) -> Identity:
    """Whoever answers for one of the job's components."""
    return Identity(CLUSTER, Party.JOB, job)


def issue_job_credentials(host_memory: Path, job: JobId) -> None:
    """Writes new ones into the job's folder in host memory. OSError."""
    with TemporaryDirectory(dir=host_memory) as folder:
        authority = Authority.create(Path(folder), CLUSTER)
        for identity in (SCHEDULER, job_identity(job), OPERATOR, SERVERS):
            to = credential_folder(host_memory, identity.party)
            authority.issue(identity, to, addresses=[LOOPBACK] if identity is SERVERS else [], days=MOST_DAYS)


def credentials_folder(host_memory: Path) -> Path:
    """It has a folder for each party."""
    return host_memory / "credentials"


def store_folders(host_memory: Path) -> dict[str, Path]:
    """By key of the config's servers: the folder with those of both parties that come to them, where they travel."""
    return {f"{kind}_credentials": credentials_folder(host_memory) / kind for kind in ("nats", "redis")}


def job_folders(host_memory: Path) -> tuple[Path, ...]:
    """What the processes of the job's components show: to each other, and to NATS and Redis."""
    to_stores = (folder / Party.JOB for folder in store_folders(host_memory).values())
    return credential_folder(host_memory, Party.JOB), *to_stores


def credential_folder(host_memory: Path, party: Party) -> Path:
    """Where the credential of one of the job's parties is."""
    return credentials_folder(host_memory) / party
