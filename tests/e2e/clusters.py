"""A cluster on this machine for tests, whose commands run in the test's process."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cli.cluster_access import agent_pid
from cli.cluster_queue import submissions
from cli.command import execute
from tests.e2e.jobs import calm_job
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.credentials import ClusterCredentials
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.config.job_config import JobConfig
from tidegate.json_text import parse_json
from tidegate.ownership.records import StoreUnavailable
from tidegate.ports.store import Identity as StoreIs
from tidegate.runtime.interfaces import addresses_here
from tidegate.v1 import cluster_pb2

LOOK_AGAIN_S = 0.1


class Cluster:
    """Commands run in this process, as `tidegate` runs them in its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.output_dir = folder / "jobs"
        self.folder = ClusterFolder.of(self.output_dir)
        self._configs = folder
        self._capsys = capsys

    def run(self, *words: str, is_refused: bool = False) -> str:
        """What the command prints: its result, or where it is refused, why."""
        code = execute([*words, "--output-dir", str(self.output_dir)])
        out, said = self._capsys.readouterr()
        assert bool(code) is is_refused, f"{words} ended with {code}: {said}"
        return said if is_refused else out

    def submit(self, job: str, *words: str, is_refused: bool = False, **changes: Any) -> str:
        path = self._configs / f"{job}.yaml"
        path.write_text(yaml.safe_dump(tiny_job(job, **changes)))
        return self.run("submit", str(path), *words, is_refused=is_refused)

    def until(self, job: str, *, state: str) -> cluster_pb2.Submission:
        """The record of a job, once it is in this state. AssertionError where it ends in another one."""
        while True:
            found = next((each for each in asyncio.run(submissions(self.output_dir)) if each.job == job), None)
            if found is not None and state in (found.state, found.end):
                return found
            assert found is None or found.state != "ended", f"{job} ended {found.end}: {found.message}"
            time.sleep(LOOK_AGAIN_S)

    def until_trained(self, job: str) -> None:
        """Waits for a checkpoint of the job."""
        while not any((self.output_dir / job / "checkpoints").glob("*/manifest.json")):
            time.sleep(LOOK_AGAIN_S)

    def process(self, program: str) -> psutil.Process:
        """One of the cluster's processes, once it is there."""
        while True:
            for each in self.agent().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    # A server's title is its whole command line.
                    if any(program == Path(part.partition(" ")[0]).name for part in each.cmdline()):
                        return each
            time.sleep(LOOK_AGAIN_S)

    def strike(self, program: str) -> None:
        """Kills one of the cluster's processes, once it is there."""
        self.process(program).kill()

    def store(self) -> StoreIs:
        """Which Redis answers, and which one was opened last. It is asked until it answers."""

        async def asked() -> StoreIs:
            there = ClusterDescription.parse(self.folder.description.read_bytes())
            own = ClusterCredentials(Path(there.credentials)).of(Party.SCHEDULER)
            store = redis_store(there.redis_url, credential=own)
            try:
                while True:
                    with suppress(StoreUnavailable):
                        return await store.identity()
                    await asyncio.sleep(LOOK_AGAIN_S)
            finally:
                await store.aclose()

        return asyncio.run(asked())

    def told(self) -> list[dict[str, Any]]:
        """Each change of a job, as the scheduler's log has it."""
        lines = (self.folder.logs / "cluster.jsonl").read_text().splitlines()
        return [line for line in map(parse_json, lines) if line["event"] == "job"]

    def nodes_of(self, job: str) -> list[str]:
        """The node of each start of a job that lies on one."""
        starts = [line["gpus"] for line in self.told() if (line["job"], line["state"]) == (job, "placed")]
        return [gpus[0].partition("/")[0] for gpus in starts]

    def granted(self, job: str) -> set[tuple[str, int, int]]:
        """The GPUs that the job's processes had, each with its token: (GPU, term, counter)."""
        lines = (self.output_dir / job / "events.jsonl").read_text().splitlines()
        grants = [grant for line in map(parse_json, lines) for grant in line["event"].get("grants", ())]
        return {(each["gpu"], int(each["token"]["term"]), int(each["token"]["counter"])) for each in grants}

    def summary(self, job: str) -> dict[str, Any]:
        found = parse_json((self.output_dir / job / "result.json").read_text())
        return dict(found["summary"])

    def host_memory(self) -> list[Path]:
        """The folders of the cluster and of its jobs."""
        configs = [JobConfig.read(path) for path in self.output_dir.glob("*/config.json")]
        assert configs
        own = self.folder.host_memory(Path("/dev/shm"))
        return [own, *(Path(each.runtime.host_memory_root) for each in configs)]

    def agent(self) -> psutil.Process:
        pid = agent_pid(self.folder)
        assert pid is not None
        return psutil.Process(pid)


def tiny_job(job: str, **changes: Any) -> dict[str, Any]:
    """On three GPUs of one node."""
    raw = calm_job(job, **{"algorithm__iterations": 1, **changes})
    raw["cluster"] = {
        "nodes": {"a": 3},
        "component_placement": {"actor": "0", "rollout": "1", "inference": "2"},
    }
    raw["actor"]["layout"] = {}
    return raw


def own_address() -> str:
    """An address of this machine that is not loopback."""
    found = [address for address in addresses_here() if not IPv4Address(address).is_loopback]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


def standing_by(folder: Path) -> tuple[str, ...]:
    """The words of `up` for a machine that may keep the cluster by turns, with a credential and gates in the folder."""
    authority = Authority.create(folder / "ca", "lab")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), folder / "operator")
    authority.issue(Identity("lab", Party.NODE, "me"), folder / "me")
    (gates := folder / "gates").mkdir()
    address = own_address()
    where = ("--machine", f"me={address}:7400", "--address", address, "--gate-root", str(gates))
    credentials = ("--machine-credentials", str(folder / "operator"), "--node-credentials", str(folder / "me"))
    return ("up", "n0=3@me", "--standby", *where, *credentials)
