"""Three machines that may all keep a cluster: one does, and whichever of them is lost, the others go on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tests.hosts.containers import ADDRESSES, MARKS, NAMESPACE, Container, networked
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once, summary_of
from tests.two_machines import sh
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.folder import state_of
from tidegate.cluster.keepers import SILENT_S, Keepers
from tidegate.json_text import parse_json

pytestmark = [*MARKS, pytest.mark.timeout(600)]

LOOK_AGAIN_S = 0.5
SHARED = "/srv/tidegate"
LISTENERS = {
    "server": r"-server ",
    "agent": "tidegate agent",
    "cluster": r"services\.(node|scheduler\.cluster) ",
    "of a job": "tidegate",
}
"""What the command line of a process of each kind has; the last is of all the others that are ours."""
NODES = {"a": "n0", "b": "n1", "c": "n2"}


@dataclass
class Lab:
    """`storage` is what all machines share."""

    storage: Path
    machines: dict[str, Container]

    def begin(self, name: str) -> None:
        """A machine's agent, and the cluster that it keeps or stands by for, as units."""
        own = f"{ADDRESSES[name]}:7400 --credentials {SHARED}/cred-{name}"
        others = " ".join(f"--machine {each}={address}:7400" for each, address in ADDRESSES.items())
        nodes = " ".join(f"{node}=4@{each}" for each, node in NODES.items())
        credentials = f"--machine-credentials {SHARED}/operator --node-credentials {SHARED}/cred-{name}"
        keeps = f"--address {ADDRESSES[name]} {credentials} --gate-root /gates --standby"
        tidegate = f"{sys.prefix}/bin/tidegate"
        units = {
            "agent": f"{tidegate} agent --listen {own}",
            "cluster": f"{tidegate} up {nodes} {others} {keeps} --output-dir {SHARED}/jobs --foreground",
        }
        machine = self.machines[name]
        # NATS and Redis have their data on a disk of their own, which can be full. NATS reserves 2.5 GiB for each job.
        state = f"/gates/{state_of(Path(SHARED) / 'jobs')}"
        machine.said(f"mkdir -p {state}; mount -t tmpfs -o size=16G tmpfs {state}")
        for unit, command in units.items():
            options = f"-p Restart=always -p RestartSec=1 -p WorkingDirectory={REPOSITORY}"
            machine.said(f"systemd-run --unit={unit} {options} {command}")

    @property
    def jobs(self) -> Path:
        return self.storage / "jobs"

    @property
    def keeper(self) -> str:
        term = Keepers(self.jobs / ".cluster" / "keepers").newest()
        assert term is not None
        return term.name

    def tidegate(self, *words: str, on: str | None = None) -> Any:
        """What a command says, as JSON, on a machine. None: on another one than the keeper."""
        command = f"{sys.prefix}/bin/tidegate {' '.join(words)} --output-dir {SHARED}/jobs -o json"
        other = next(name for name in ("c", "b") if name != self.keeper)
        return parse_json(self.machines[on or other].said(f"cd {REPOSITORY}; {command}"))

    def submit(self, name: str, *, iterations: int = ITERATIONS) -> None:
        raw = small_job(name, algorithm__iterations=iterations)
        (self.storage / f"{name}.yaml").write_text(yaml.safe_dump(raw))
        self.tidegate("submit", f"{SHARED}/{name}.yaml")

    def row(self, what: str, name: str, *, on: str | None = None) -> dict[str, Any]:
        """Empty where nobody answers, or nobody knows it."""
        with suppress(AssertionError):
            return next(
                (each for each in self.tidegate("get", what, on=on) if name in (each.get("job"), each.get("node"))), {}
            )
        return {}

    def checkpoints(self) -> set[Path]:
        """Those of all jobs."""
        return {*self.jobs.glob("*/checkpoints/*/manifest.json")}


def assert_listeners_are_known(lab: Lab, name: str) -> None:
    """Whoever scans a machine finds what docs/security.md lists, on its one address: its agent, the fronts of the
    keeper's servers, the instances and the ranks of its jobs."""
    script = "ss -Hltnp | awk '{print $4, $6}' | sed -E 's/users:.*pid=([0-9]+),.*/\\1/'"
    others = []
    counts = Counter[str]()
    for line in lab.machines[name].said(script).splitlines():
        where, _, pid = line.partition(" ")
        host, _, port = where.replace("[::ffff:", "").replace("]", "").rpartition(":")
        command = lab.machines[name].said(f"tr '\\0' ' ' < /proc/{pid}/cmdline || true")
        kind = next((kind for kind, words in LISTENERS.items() if re.search(words, command)), None)
        if kind is None or IPv4Address(host).is_loopback:
            continue
        counts[kind] += 1
        if host != ADDRESSES[name] or (kind == "agent" and port != "7400"):
            others.append((where, command))
    assert not others
    # NATS, Redis, and the queue's API.
    assert (counts["agent"], counts["cluster"]) == (1, 3 if name == lab.keeper else 0)
    assert not counts["server"]


SCAN = """
import socket, sys
for port in range(1, 1 << 16):
    with socket.socket() as connection:
        connection.settimeout(5)
        if connection.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


def assert_a_scan_finds_what_is_listed(lab: Lab, name: str) -> None:
    """Scans a machine without a job from another one: it has its agent, and the three of the keeper's cluster."""
    other = next(each for each in ADDRESSES if each != name)
    found = lab.machines[other].said(f"{sys.prefix}/bin/python -c {shlex.quote(SCAN)} {ADDRESSES[name]}").split()
    ours = {*found} - {"22"}  # the machine's sshd
    assert "7400" in ours
    assert len(ours) == (4 if name == lab.keeper else 1), found


LOOK_FOR_SECRETS = """
cd /dev/shm
for each in /srv/tidegate/operator /srv/tidegate/cred-* $(find . -name credential.pem -exec dirname {} +); do
    cat $each/store.password && echo && sed -n 2p $each/credential.pem || true  # a job may end meanwhile
done 2> /dev/null | grep . > /run/secrets
wc -l < /run/secrets
grep -raFl -f /run/secrets /srv/tidegate/jobs || true
journalctl | grep -aF -f /run/secrets || true
cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2> /dev/null | grep -acF -f /run/secrets || true
rm /run/secrets
"""
"""The number of passwords and private keys, and then where one is told."""


def assert_no_secret_is_told(lab: Lab, name: str) -> None:
    """In a file of a job or of the cluster, a log, a command line or an environment."""
    num_secrets, *told = lab.machines[name].said(LOOK_FOR_SECRETS).splitlines()
    assert int(num_secrets) >= 2 * (1 + len(NODES))
    assert told == ["0"]


def assert_a_job_is_commanded_from_another_machine(lab: Lab) -> None:
    """Its own API is on the keeper's loopback."""
    lab.submit("asked", iterations=1000)
    until(lambda: lab.row("jobs", "asked").get("state") == "running")
    assert lab.tidegate("scale", "asked", "--rollout", "2", "--wait")["state"] == "committed"
    assert lab.tidegate("describe", "asked")["incarnation"] == 1
    gpus = lab.tidegate("get", "gpus", "asked")
    assert sum(each["role"] == "rollout" for each in gpus) == 2
    assert lab.tidegate("top", "asked", "--once")["state"] == "running"
    assert lab.tidegate("logs", "asked", "launcher", "--tail", "1")
    lab.tidegate("cancel", "asked")
    until(lambda: lab.row("jobs", "asked").get("state") == "cancelled")
    shutil.rmtree(lab.jobs / "asked")  # the checkpoints are counted


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(LOOK_AGAIN_S)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    storage = tmp_path / "storage"
    storage.mkdir()
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), storage / "operator")
    for name in ADDRESSES:
        authority.issue(Identity("lab", Party.NODE, name), storage / f"cred-{name}")
    with networked(storage) as machines:
        found = Lab(storage, machines)
        for name in ADDRESSES:
            found.begin(name)
            if name == "a":
                until(lambda: (storage / "jobs" / ".cluster" / "keepers" / "1.json").exists())
        yield found


def test_a_job_goes_on_whichever_machine_keeps_the_cluster(lab: Lab, want_checksum: str) -> None:
    until(lambda: all(lab.row("nodes", node).get("state") == "ready" for node in NODES.values()))
    assert lab.keeper == "a"
    kept = {name: lab.row("nodes", node)["message"] for name, node in NODES.items()}
    assert kept == {"a": "its machine keeps the cluster", "b": "", "c": ""}
    for name in NODES:
        assert_a_scan_finds_what_is_listed(lab, name)
    assert_a_job_is_commanded_from_another_machine(lab)
    lab.submit("one")
    lab.submit("waits")
    until(lambda: bool(lab.checkpoints()))

    # A further machine that has the storage: the one of this test.
    command = [sys.executable, "-m", "cli", "wait", "nobody", "--output-dir", str(lab.jobs)]
    for variables, told in (
        ({"TIDEGATE_OPERATOR": str(lab.storage / "operator")}, "has no job nobody; it has asked, one, waits"),
        ({"TIDEGATE_OPERATOR": str(lab.storage / "cred-b")}, "node/b of cluster lab may not call"),
        ({}, f"a ({ADDRESSES['a']}) does, with its last beat "),
    ):
        env = {**os.environ, **variables}
        asked = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
        assert asked.returncode != 0
        assert told in asked.stderr

    for name in NODES:
        assert_listeners_are_known(lab, name)
        assert_no_secret_is_told(lab, name)

    before = lab.checkpoints()
    began_s = time.monotonic()
    lab.machines["a"].end()
    until(lambda: lab.keeper != "a")
    taken_s = time.monotonic() - began_s
    until(lambda: not lab.checkpoints() <= before)
    print(f"taken after {taken_s:.1f} s, trained after {time.monotonic() - began_s:.1f} s")
    assert lab.row("nodes", "n0")["state"] == "away"

    # Its process alone is killed: the machine is there, and takes its next term at once.
    second = lab.keeper
    before = lab.checkpoints()
    lab.machines[second].said("kill -KILL $(systemctl show --value -p MainPID cluster)")
    until(lambda: not lab.checkpoints() <= before)
    assert lab.keeper == second

    # In order: the other one begins at once.
    lab.machines[second].said("systemctl stop cluster")
    until(lambda: lab.keeper != second)
    for job in ("one", "waits"):
        until(lambda job=job: lab.row("jobs", job).get("state") == "finished")  # type: ignore[misc]  # each one's own
        until(lambda job=job: (lab.jobs / job / "result.json").exists())  # type: ignore[misc]
        assert_all_was_trained_once(lab.jobs / job, summary_of(lab.jobs / job), want_checksum)


def test_a_keeper_whose_servers_have_no_disk_gives_its_turn_away(lab: Lab, want_checksum: str) -> None:
    until(lambda: all(lab.row("nodes", node).get("state") == "ready" for node in NODES.values()))
    lab.submit("one")
    until(lambda: bool(lab.checkpoints()))
    state = f"/gates/{state_of(Path(SHARED) / 'jobs')}"
    lab.machines["a"].said(f"mount -o remount,size=$(($(du -sk {state} | cut -f1) + 64))k {state}")
    until(lambda: lab.keeper != "a")
    until(lambda: lab.row("jobs", "one").get("state") == "finished")
    until(lambda: (lab.jobs / "one" / "result.json").exists())
    assert_all_was_trained_once(lab.jobs / "one", summary_of(lab.jobs / "one"), want_checksum)


def test_a_keeper_that_is_cut_off_from_the_others_keeps_its_storage_and_its_turn(lab: Lab) -> None:
    until(lambda: lab.row("nodes", "n2", on="a").get("state") == "ready")
    sh(f"ip -n {NAMESPACE} link set to-a down")
    until(lambda: lab.row("nodes", "n2", on="a").get("state") == "away")
    time.sleep(SILENT_S + 5)
    sh(f"ip -n {NAMESPACE} link set to-a up")
    until(lambda: lab.row("nodes", "n2", on="a").get("state") == "ready")
    assert lab.keeper == "a"
