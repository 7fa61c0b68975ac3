"""`make deploy` on three machines with a real systemd, over SSH."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tests.hosts.containers import ADDRESSES, MARKS, Container, networked
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once, summary_of
from tidegate.cluster.keepers import Keepers

pytestmark = [
    *MARKS,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("sshd") is None, reason="it needs sshd (openssh-server)"),
    pytest.mark.skipif(shutil.which("sudo") is None, reason="it needs sudo"),
]

MOST_DEPLOY_S = 300
LOOK_AGAIN_S = 0.5
ENDLESS = 1_000_000
"""Iterations of a job that is cancelled."""
OTHER_RELEASE = f"""
mkdir -p /opt/other/bin; cd /opt/other
cp {sys.prefix}/pyvenv.cfg .; ln -s {sys.prefix}/lib lib; ln -s $(readlink -f {sys.executable}) bin/python
sed '1s:.*:#!/opt/other/bin/python:' {sys.prefix}/bin/tidegate > bin/tidegate; chmod +x bin/tidegate
"""
"""The same code under another Python."""
MAIN_PIDS = "systemctl show -p MainPID --value 'tidegate-*@tidegate.service'"


@dataclass
class Site:
    """Machine a keeps the cluster. `folder` has the inventory; `storage` is what all share."""

    folder: Path
    storage: Path
    machines: dict[str, Container]

    def inventory(self, *, names: Sequence[str] = tuple(ADDRESSES), **changes: Any) -> dict[str, Any]:
        """`names`: of its hosts. `changes`: of the variables of all, or of a host by its name."""
        hosts: dict[str, dict[str, Any]] = {name: {"ansible_host": ADDRESSES[name]} for name in names}
        for number, name in enumerate(names):
            hosts[name] |= {"tidegate_nodes": {f"n{number}": 4}, **changes.pop(name, {})}
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.folder / "key"),
            "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
            "ansible_python_interpreter": "/usr/bin/python3",
            "tidegate_environment": sys.prefix,
            **changes,
        }
        groups: dict[str, list[str]] = {"tidegate_keeper": [], "tidegate_machines": [], "others": []}
        for name, host in hosts.items():
            usual = "tidegate_keeper" if name == "a" else "tidegate_machines"
            groups[host.pop("in_group", usual)].append(name)
        return {
            "all": {
                "vars": variables,
                "children": {
                    group: {"hosts": {name: hosts[name] for name in names}} for group, names in groups.items()
                },
            }
        }

    def certs(self, *words: str) -> str:
        command = [
            f"{sys.prefix}/bin/tidegate",
            "certs",
            *words,
            "--authority",
            str(self.folder / "tidegate-authority"),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def make(self, target: str, *words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        inventory = self.folder / "inventory.yml"
        inventory.write_text(yaml.safe_dump(self.inventory(**changes)))
        command = ["make", target, f"INVENTORY={inventory}", f"ARGS={' '.join(words)}"]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    def deploy(self, *words: str, **changes: Any) -> dict[str, int]:
        """By machine: how many tasks changed something."""
        done = self.make("deploy", *words, **changes)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        told = re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+)", done.stdout, re.MULTILINE)
        return {name: int(num) for name, num in told if name in self.machines}

    def tidegate(self, *words: str, on: str = "a") -> str:
        """What a command of the cluster's user says on a machine."""
        command = " ".join(("/opt/tidegate/bin/tidegate", *words, "--output-dir", "/srv/tidegate/jobs"))
        return self.machines[on].said(f"runuser -u tidegate -- {command}")

    def said_here(self, *words: str) -> str:
        """What a command says on this machine, which has none of the cluster's folders."""
        command = [f"{sys.prefix}/bin/tidegate", *words]
        env = {**os.environ, "XDG_CONFIG_HOME": str(self.folder)}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=True).stdout

    @property
    def keeper(self) -> str:
        """The machine that keeps the cluster, of those that may."""
        term = Keepers(self.storage / "jobs" / ".cluster" / "keepers").newest()
        assert term is not None
        return term.name

    def undeploy(self, *words: str, **changes: Any) -> None:
        done = self.make("undeploy", *words, **changes)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

    def submit(self, name: str, *, on: str = "a", iterations: int = ITERATIONS) -> None:
        raw = small_job(name, algorithm__iterations=iterations)
        (self.storage / f"{name}.yaml").write_text(yaml.safe_dump(raw))
        self.tidegate("submit", f"/srv/tidegate/{name}.yaml", on=on)

    def until_saved(self, name: str) -> None:
        while not list((self.storage / "jobs" / name / "checkpoints").glob("*/manifest.json")):
            time.sleep(LOOK_AGAIN_S)

    def summary_of(self, name: str) -> dict[str, Any]:
        while not (self.storage / "jobs" / name / "result.json").exists():
            time.sleep(LOOK_AGAIN_S)
        return summary_of(self.storage / "jobs" / name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, storage = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("storage")
    storage.chmod(0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    key = (folder / "key.pub").read_text().strip()
    with networked(storage) as machines:
        for each in machines.values():
            each.said(f"mkdir -p ~root/.ssh /run/sshd; echo '{key}' > ~root/.ssh/authorized_keys; systemctl start ssh")
            each.said(
                "useradd --create-home --shell /bin/bash carol; install -d -o carol -m 700 ~carol/.ssh; "
                "install -o carol ~root/.ssh/authorized_keys ~carol/.ssh; "
                "echo 'carol ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/carol"
            )
        yield Site(folder, storage, machines)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"b": {"tidegate_nodes": {"n0": 4}}}, "two have one name", id="one node twice"),
        pytest.param({"b": {"tidegate_nodes": {}}}, "b has tidegate_nodes", id="no nodes"),
        pytest.param({"c": {"tidegate_address": "10.78.0.99"}}, "c has no address 10.78.0.99", id="a wrong address"),
        pytest.param({"tidegate_user": "daemon"}, "user daemon is daemon:x:1:", id="a user of another number"),
        pytest.param({"tidegate_cluster": "Lab"}, "a of cluster Lab: both names need", id="no name of a credential"),
        pytest.param({"a": {"in_group": "others"}}, "tidegate_keeper has no host", id="no keeper"),
        pytest.param({"tidegate_storage": "/srv/none"}, "has no folder /srv/none", id="no storage"),
        pytest.param({"tidegate_environment": "/opt/none"}, "has no /opt/none/bin/tidegate", id="no environment"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_anything_changes(
    site: Site, changes: dict[str, Any], reason: str
) -> None:
    done = site.make("deploy", **changes)
    assert done.returncode != 0
    assert reason in " ".join(done.stdout.split()), done.stdout
    assert not (site.folder / "tidegate-authority").exists()
    assert site.machines["b"].said("ls -d /etc/tidegate /opt/tidegate || true") == ""


def test_a_part_of_the_machines_is_not_deployed_to(site: Site) -> None:
    done = site.make("deploy", "--limit", "b")
    assert done.returncode != 0
    assert "only b of the inventory" in " ".join(done.stdout.split()), done.stdout


def assert_credentials_are_renewed(site: Site) -> None:
    """Before they end, and after they were revoked. The cluster is asked with them in between."""

    def serial() -> str:
        return site.machines["b"].said(
            "openssl x509 -noout -serial -in /etc/tidegate/node/credential.pem; cat /etc/tidegate/node/revoked.json"
        )

    seen = [serial()]
    site.deploy(tidegate_renew_days=120)
    seen.append(serial())
    issued = json.loads(site.certs("-o", "json", "list"))
    own = [each["serial"] for each in issued if each["name"] == "b"][-1]
    site.certs("revoke", own)
    site.deploy()
    seen.append(serial())
    assert len({*seen}) == 3
    assert own in seen[-1]
    assert site.deploy() == dict.fromkeys(ADDRESSES, 0)
    assert {row["state"] for row in json.loads(site.tidegate("get", "nodes", "-o", "json"))} == {"ready"}


def assert_a_release_waits_for_jobs(site: Site) -> None:
    """One with the same code, at another path."""
    for name in ("undisturbed", "behind"):
        site.submit(name, iterations=6 * ITERATIONS)
    site.until_saved("undisturbed")
    waits = ("-e", "tidegate_waits_for_jobs=true", "-e", "tidegate_environment=/opt/other")
    done = site.make("deploy", *waits, "-e", "tidegate_most_wait_minutes=0.01")
    assert done.returncode != 0
    told = " ".join(done.stdout.split())
    assert re.search("not ended: (undisturbed|behind): the cluster goes on with its release", told), told[-4000:]
    assert "paused" not in site.tidegate("get", "jobs")
    assert min(site.deploy(*waits).values()) > 0
    # A pause of a run that was cut off goes with the next one, and that of a person stays.
    site.tidegate("pause", "--reason", "'make deploy waits for the jobs that run'")
    assert site.deploy(*waits) == dict.fromkeys(ADDRESSES, 0) | {"a": 1}
    # Where no cluster is up there is nothing to wait for.
    site.tidegate("pause", "--reason", "disks")
    site.machines["a"].said("systemctl stop tidegate-cluster@tidegate")
    assert min(site.deploy("-e", "tidegate_waits_for_jobs=true").values()) > 0
    assert "disks" in site.tidegate("pause", "--reason", "another")
    site.tidegate("pause", "--undo")
    ended = json.loads(site.tidegate("wait", "undisturbed", "behind", "-o", "json"))
    assert {row["job"]: (row["state"], row["starts"]) for row in ended} == {
        "undisturbed": ("finished", 1),
        "behind": ("finished", 1),
    }


def assert_ran_on(site: Site, job: str, *, on: str = "a") -> None:
    """The job has one start and trains. It is cancelled then."""
    (row,) = json.loads(site.tidegate("get", "jobs", job, "-o", "json", on=on))
    assert row["state"] == "running"
    lines = (site.storage / "jobs" / ".cluster" / "logs" / "cluster.jsonl").read_text().splitlines()
    told = [line for line in map(json.loads, lines) if line.get("job") == job]
    assert [line["state"] for line in told if "state" in line].count("placed") == 1
    saved = {path.name for path in (site.storage / "jobs" / job / "checkpoints").iterdir()}
    while not {path.name for path in (site.storage / "jobs" / job / "checkpoints").iterdir()} - saved:
        time.sleep(LOOK_AGAIN_S)
    site.tidegate("cancel", job, on=on)
    summary = site.summary_of(job)
    assert (summary["lost"], summary["duplicates"]) == (0, 0)


def assert_a_release_interrupts_no_job(site: Site) -> None:
    """Agents and the cluster take another release while the job runs."""
    for each in site.machines.values():
        each.said(
            "mkdir -p /opt/tidegate-releases; cd /opt/tidegate-releases; mkdir old new broken used; "
            "touch new/.installed; touch -d '2 days ago' old/.installed used/.installed; "
            "mkdir used/bin; cp /bin/sleep used/bin/python; "
            "systemd-run --quiet --unit=of-a-job /opt/tidegate-releases/used/bin/python 10000"
        )
    before = {name: machine.said(MAIN_PIDS) for name, machine in site.machines.items()}
    site.submit("third", iterations=ENDLESS)
    site.until_saved("third")
    assert min(site.deploy(tidegate_environment="/opt/other").values()) > 0
    assert site.deploy(tidegate_environment="/opt/other") == dict.fromkeys(ADDRESSES, 0)
    assert {name: machine.said(MAIN_PIDS) for name, machine in site.machines.items()} == before
    # The processes of the job run on, and what is not its own is of the other release.
    for name, program in (("a", "services.node.launch"), ("b", "services.actor")):
        running = site.machines[name].said(f"pgrep --full --list-full -- '-m {program}'")
        assert running.split()[1].startswith(sys.prefix), running
    assert "/opt/other/bin/python" in site.machines["a"].said("pgrep --full --list-full services.scheduler.cluster")
    told = site.machines["b"].said("journalctl -o cat -u tidegate-agent@tidegate | grep -c 'listens on'")
    assert int(told) > 1, "the agent of b has taken its program anew"
    assert_ran_on(site, "third")
    found = site.machines["b"].said("ls /opt/tidegate-releases").split()
    assert found == ["new", "used"], "one to go back to, and that of a process"
    for each in site.machines.values():
        each.said("systemctl stop of-a-job")


def assert_nothing_is_left(site: Site, *names: str) -> None:
    for name in names:
        machine = site.machines[name]
        assert machine.said("pgrep -u tidegate || true") == ""
        left = "ls -d /etc/tidegate /opt/tidegate /var/lib/tidegate /etc/systemd/system/tidegate* || true"
        assert machine.said(left) == ""


def test_of_two_machines_that_may_keep_the_cluster_the_other_one_does_once_the_first_is_stopped(
    site: Site, want_checksum: str
) -> None:
    two = {"b": {"in_group": "tidegate_keeper"}, "tidegate_command_port": 7401}
    assert min(site.deploy(**two).values()) > 0
    assert site.deploy(**two) == dict.fromkeys(ADDRESSES, 0), "a second run changes nothing"
    first = site.keeper
    site.certs("issue", "operator", "me", "--to", str(site.folder / "me"))
    keepers = (f"--keeper={name}={ADDRESSES[name]}:7401" for name in "ab")
    site.said_here("context", "add", "lab", "--operator", str(site.folder / "me"), *keepers)
    nodes = json.loads(site.said_here("get", "nodes", "--cluster", "lab", "-o", "json"))
    assert ["keeps" in row["message"] for row in nodes if row["machine"] == first] == [True]
    for each in site.machines.values():
        each.said(OTHER_RELEASE)
    site.submit("through", on=first, iterations=ENDLESS)
    site.until_saved("through")
    site.deploy(tidegate_environment="/opt/other", **two)
    assert site.deploy(tidegate_environment="/opt/other", **two) == dict.fromkeys(ADDRESSES, 0)
    assert site.keeper == first, "its turn goes on under the other release"
    assert_ran_on(site, "through", on=first)
    site.submit("kept", on=first)
    site.until_saved("kept")
    site.machines[first].said("systemctl stop tidegate-cluster@tidegate")
    while (second := site.keeper) == first:
        time.sleep(LOOK_AGAIN_S)
    assert {first, second} == {"a", "b"}
    # The stop wrote a result, of an interrupted run.
    wait = "runuser -u tidegate -- /opt/tidegate/bin/tidegate wait kept --output-dir /srv/tidegate/jobs"
    site.machines[second].until(wait)
    assert "finished" in site.said_here("get", "jobs", "kept", "--cluster", "lab")
    assert_all_was_trained_once(site.storage / "jobs" / "kept", site.summary_of("kept"), want_checksum)
    site.deploy(**two)
    assert "stands by" in site.machines[first].said("journalctl -u tidegate-cluster@tidegate | tail -n 3")
    site.undeploy(**two)
    assert_nothing_is_left(site, *ADDRESSES)
    # The next cluster in this folder has one keeper.
    shutil.rmtree(site.folder / "tidegate-authority")


def test_a_cluster_is_deployed_trains_a_job_over_its_machines_loses_one_and_goes(
    site: Site, want_checksum: str
) -> None:
    site.deploy("--check")
    assert site.machines["b"].said("ls -d /etc/tidegate /opt/tidegate || true") == ""
    began_s = time.monotonic()
    assert min(site.deploy().values()) > 0
    assert time.monotonic() - began_s <= MOST_DEPLOY_S
    assert site.deploy() == dict.fromkeys(ADDRESSES, 0), "a second run changes nothing"
    assert site.deploy("--check") == dict.fromkeys(ADDRESSES, 0)
    assert site.machines["b"].said("stat -c '%U %a' /etc/tidegate/node/credential.pem") == "tidegate 600"

    assert_credentials_are_renewed(site)
    for name in ("first", "second"):
        site.submit(name)
    for name in ("first", "second"):
        assert_all_was_trained_once(site.storage / "jobs" / name, site.summary_of(name), want_checksum)

    assert_a_release_waits_for_jobs(site)
    assert_a_release_interrupts_no_job(site)
    site.submit("fourth")
    site.until_saved("fourth")
    site.machines["c"].end()
    assert_all_was_trained_once(site.storage / "jobs" / "fourth", site.summary_of("fourth"), want_checksum)
    assert "away" in site.tidegate("get", "nodes")

    site.undeploy("--limit", "a,b")
    assert_nothing_is_left(site, "a", "b")
    assert (site.storage / "jobs" / "first" / "result.json").exists()

    # A cluster of one machine, by a user who becomes root.
    by_carol = {"names": ("a",), "ansible_user": "carol", "ansible_become": True, "tidegate_command_port": 7401}
    assert min(site.deploy(**by_carol).values()) > 0
    assert site.deploy(**by_carol) == {"a": 0}
    site.certs("issue", "viewer", "looks", "--to", str(site.folder / "looks"))
    keeper = f"--keeper=a={ADDRESSES['a']}:7401"
    site.said_here("context", "add", "one", "--operator", str(site.folder / "looks"), keeper)
    assert [row["node"] for row in json.loads(site.said_here("get", "nodes", "--cluster", "one", "-o", "json"))] == [
        "n0"
    ]
