"""The agent's hold on its folder, and the credentials of a cluster."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from services.node.__main__ import AgentRuns, locked
from tidegate.certs.authority import Credential
from tidegate.certs.identity import Party
from tidegate.cluster.credentials import ClusterCredentials
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.cluster.slots import Slots
from tidegate.types import JobId, NodeId


def test_a_second_agent_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = ClusterFolder.of(tmp_path)
    with locked(folder), pytest.raises(AgentRuns, match=r"is up in .*: end it with tidegate down"), locked(folder):
        pass
    with locked(folder):
        pass


def test_each_job_has_credentials_of_its_own_that_only_this_user_can_read(tmp_path: Path) -> None:
    credentials = ClusterCredentials.issue(tmp_path / "credentials")
    folders = [folder for job in ("one", "two") for folder in credentials.issue_to_job(JobId(job))]
    found = [Credential.load(folder) for folder in folders]
    assert [str(each.identity) for each in found] == [
        "scheduler/scheduler-of-one of cluster local",
        "job/one of cluster local",
        "scheduler/scheduler-of-two of cluster local",
        "job/two of cluster local",
    ]
    assert len({each.store_password for each in found}) == 4
    for folder in (*folders, credentials.of(Party.OPERATOR), credentials.root / "authority"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_description_survives_its_json_and_another_text_is_refused() -> None:
    there = ClusterDescription(Slots({NodeId("n0"): 8}, "cpu", 2), "tls://a", "redis://b", "127.0.0.1:1", "/dev/shm/x")
    assert ClusterDescription.parse(there.to_json()) == there
    for text, words in (("{}", "no 'slots'"), (there.to_json().replace('"cpu"', '"tpu"'), "device is 'tpu'")):
        with pytest.raises(ValueError, match=words):
            ClusterDescription.parse(text)
