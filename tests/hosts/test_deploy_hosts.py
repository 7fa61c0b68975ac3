"""`make deploy` on three machines with a real systemd, over SSH."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tests.hosts.containers import MARKS, Container, booted
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once, summary_of
from tests.two_machines import sh

pytestmark = [
    *MARKS,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("sshd") is None, reason="it needs sshd (openssh-server)"),
]

NAMESPACE, HERE = "tidegate-d", "10.78.0.1"
"""The machines' network: a bridge in a namespace of its own, where no rule of this machine's firewall is."""
ADDRESSES = {"a": "10.78.0.11", "b": "10.78.0.12", "c": "10.78.0.13"}
MOST_DEPLOY_S = 300
LOOK_AGAIN_S = 0.5


@dataclass
class Site:
    """Machine a keeps the cluster. `folder` has the inventory; `storage` is what all share."""

    folder: Path
    storage: Path
    machines: dict[str, Container]

    def inventory(self, **changes: Any) -> dict[str, Any]:
        """`changes`: of the variables of all, or of a host by its name."""
        hosts: dict[str, dict[str, Any]] = {name: {"ansible_host": ADDRESSES[name]} for name in self.machines}
        for number, name in enumerate(self.machines):
            hosts[name] |= {"tidegate_nodes": {f"n{number}": 4}, **changes.pop(name, {})}
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.folder / "key"),
            "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
            "ansible_python_interpreter": "/usr/bin/python3",
            "tidegate_environment": sys.prefix,
            **changes,
        }
        keeper, *others = hosts
        groups = {"tidegate_keeper": [keeper], "tidegate_machines": others}
        return {
            "all": {
                "vars": variables,
                "children": {
                    group: {"hosts": {name: hosts[name] for name in names}} for group, names in groups.items()
                },
            }
        }

    def make(self, target: str, *words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        inventory = self.folder / "inventory.yml"
        inventory.write_text(yaml.safe_dump(self.inventory(**changes)))
        command = ["make", target, f"INVENTORY={inventory}", f"ARGS={' '.join(words)}"]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    def deploy(self, *words: str) -> dict[str, int]:
        """By machine: how many tasks changed something."""
        done = self.make("deploy", *words)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return {name: int(num) for name, num in re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+)", done.stdout, re.M)}

    def tidegate(self, *words: str) -> str:
        """What a command of the cluster's user says on machine a."""
        command = " ".join(("/opt/tidegate/bin/tidegate", *words, "--output-dir", "/srv/tidegate/jobs"))
        return self.machines["a"].said(f"runuser -u tidegate -- {command}")

    def submit(self, name: str) -> None:
        raw = small_job(name, algorithm__iterations=ITERATIONS)
        (self.storage / f"{name}.yaml").write_text(yaml.safe_dump(raw))
        self.tidegate("submit", f"/srv/tidegate/{name}.yaml")

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
    with ExitStack() as stack:
        sh(f"ip netns add {NAMESPACE}")
        stack.callback(sh, f"ip netns delete {NAMESPACE}")
        inside = f"ip -n {NAMESPACE} link"
        for command in ("add net type bridge", "set net up"):
            sh(f"{inside} {command}")
        sh(f"ip link add {NAMESPACE} type veth peer name here netns {NAMESPACE}")
        for command in (f"addr add {HERE}/24 dev {NAMESPACE}", f"link set {NAMESPACE} up"):
            sh(f"ip {command}")
        sh(f"{inside} set here master net up")
        machines = {}
        for name, address in ADDRESSES.items():
            each = stack.enter_context(
                booted(f"tidegate-{name}", "--private-network", binds={storage: "/srv/tidegate"})
            )
            sh(f"{inside} add to-{name} type veth peer name host0 netns {each.leader}")
            sh(f"{inside} set to-{name} master net up")
            each.said(f"ip addr add {address}/24 dev host0; ip link set host0 up; mkdir -p /run/sshd")
            each.said(f"mkdir -p ~root/.ssh; echo '{key}' > ~root/.ssh/authorized_keys; systemctl start ssh")
            machines[name] = each
        yield Site(folder, storage, machines)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"b": {"tidegate_nodes": {"n0": 4}}}, "two have one name", id="one node twice"),
        pytest.param({"b": {"tidegate_nodes": {}}}, "b has tidegate_nodes", id="no nodes"),
        pytest.param({"c": {"tidegate_address": "10.78.0.99"}}, "c has no address 10.78.0.99", id="a wrong address"),
        pytest.param({"tidegate_user": "daemon"}, "user daemon has number 1", id="a user of another number"),
        pytest.param({"tidegate_storage": "/srv/none"}, "has no folder /srv/none", id="no storage"),
        pytest.param({"tidegate_environment": "/opt/none"}, "has no /opt/none/bin/tidegate", id="no environment"),
        pytest.param({"tidegate_device": "cuda"}, "only cpu was ever tried", id="CUDA on several machines"),
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

    for name in ("first", "second"):
        site.submit(name)
    for name in ("first", "second"):
        assert_all_was_trained_once(site.storage / "jobs" / name, site.summary_of(name), want_checksum)

    site.submit("third")
    site.submit("fourth")
    while not list((site.storage / "jobs" / "fourth" / "checkpoints").glob("*/manifest.json")):
        time.sleep(LOOK_AGAIN_S)
    site.machines["c"].end()
    for name in ("third", "fourth"):
        assert_all_was_trained_once(site.storage / "jobs" / name, site.summary_of(name), want_checksum)
    assert "away" in site.tidegate("get", "nodes")

    done = site.make("undeploy", "--limit", "a,b")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for name in ("a", "b"):
        machine = site.machines[name]
        assert machine.said("pgrep -u tidegate || true") == ""
        left = "ls -d /etc/tidegate /opt/tidegate /var/lib/tidegate /etc/systemd/system/tidegate* || true"
        assert machine.said(left) == ""
    assert (site.storage / "jobs" / "first" / "result.json").exists()
