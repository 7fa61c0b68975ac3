"""Servers of a user's own that let nobody in but one job."""

from __future__ import annotations

from pathlib import Path

from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.runtime.server_kinds import ServerGuard
from tidegate.types import LOOPBACK


def guarded(job: str, folder: Path) -> tuple[Path, ServerGuard]:
    """The folder of the job's credentials, as a config names it, and what such servers are told."""
    authority, credentials = Authority.create(folder / "ca", "lab"), folder / "credentials"
    for party, name in ((Party.SCHEDULER, "a"), (Party.JOB, job)):
        authority.issue(Identity("lab", party, name), credentials / party)
    authority.issue(Identity("lab", Party.NODE, "n0"), folder / "own", addresses=[LOOPBACK])
    return credentials, ServerGuard.of(folder / "own", credentials / Party.SCHEDULER, credentials / Party.JOB)
