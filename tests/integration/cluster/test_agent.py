"""The agent's hold on its folder, and the credentials of a cluster."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from services.node.__main__ import _watch_decisions
from services.node.agent_lock import AgentRuns, locked
from services.node.far_machines import FarMachines
from services.node.handed import Left
from services.node.jobs import NodeJobs
from services.node.servicer import NodeServicer, Version
from tidegate.certs.authority import Credential
from tidegate.certs.identity import Party
from tidegate.cluster.credentials import ClusterCredentials
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.cluster.machines import Machines
from tidegate.cluster.slots import Slots
from tidegate.runtime.embedded import ServerFailed
from tidegate.runtime.handover import NoHandover
from tidegate.runtime.processes import Supervisor
from tidegate.types import JobId, NodeId
from tidegate.v1 import cluster_pb2


def test_a_second_agent_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = ClusterFolder.of(tmp_path)
    with locked(folder), pytest.raises(AgentRuns, match=r"is up in .*: end it with tidegate down"), locked(folder):
        pass
    with locked(folder):
        pass


def test_what_was_left_of_another_folder_is_refused(tmp_path: Path) -> None:
    folder, left = ClusterFolder.of(tmp_path), Left(tmp_path / "other", 0)
    with pytest.raises(NoHandover, match=r"kept .*other, and this one was told of"), locked(folder, left):
        pass


async def test_a_keeper_that_decides_nothing_gives_its_turn_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.node.__main__.UNDECIDED_S", 3.0)
    slots, version = Slots({NodeId("n0"): 1}), Version(1)
    far = FarMachines(Machines(), slots, shared=tmp_path, host_memory_root=tmp_path, changed=version.changed)
    servicer = NodeServicer(slots, {}, far, version, host_memory_root=tmp_path)
    folder = ClusterFolder.of(tmp_path)
    servicer.jobs = NodeJobs(folder, Supervisor(), prepare=None, leave=None, changed=None)  # type: ignore[arg-type]  # no job is started
    watching = asyncio.create_task(_watch_decisions(servicer))
    for number in range(1, 9):
        await servicer.GetNode(cluster_pb2.GetNodeRequest(num_rounds=number), None)
        done, _ = await asyncio.wait({watching}, timeout=0.5)
        assert not done
    while not watching.done():
        # The same round again and again.
        await servicer.GetNode(cluster_pb2.GetNodeRequest(num_rounds=8), None)
        await asyncio.wait({watching}, timeout=0.1)
    with pytest.raises(ServerFailed, match=r"the cluster has decided nothing for 3 s"):
        await watching


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
