"""The credentials of a job on one machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tidegate.certs.authority import CA_KEY, Credential
from tidegate.certs.identity import Identity, Party
from tidegate.certs.job_credentials import (
    OPERATOR,
    SCHEDULER,
    credential_folder,
    issue_job_credentials,
    job_identity,
)
from tidegate.types import JobId

JOB = JobId("math")


@pytest.mark.parametrize("identity", [SCHEDULER, job_identity(JOB), OPERATOR], ids=lambda each: each.party)
def test_each_party_of_a_job_has_its_own_credential_that_only_this_user_can_read(
    identity: Identity, tmp_path: Path
) -> None:
    issue_job_credentials(tmp_path, JOB)
    folder = credential_folder(tmp_path, identity.party)
    assert Credential.load(folder).identity == identity
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "credential.pem").stat().st_mode) == 0o600


def test_nobody_can_issue_another_once_a_jobs_credentials_are_there(tmp_path: Path) -> None:
    issue_job_credentials(tmp_path, JOB)
    assert [path.name for path in tmp_path.iterdir()] == ["credentials"]
    assert not list(tmp_path.rglob(CA_KEY))
    assert {path.name for path in (tmp_path / "credentials").iterdir()} == {
        Party.SCHEDULER,
        Party.JOB,
        Party.OPERATOR,
        Party.NODE,
    }


def test_credentials_of_an_earlier_start_are_worth_nothing(tmp_path: Path) -> None:
    issue_job_credentials(tmp_path, JOB)
    before = Credential.load(credential_folder(tmp_path, Party.JOB))
    issue_job_credentials(tmp_path, JOB)
    after = Credential.load(credential_folder(tmp_path, Party.JOB))
    assert before.ca != after.ca
    assert before.key != after.key
