"""The manifest for Kubernetes: what its pods run is what the commands take, and both parts end together."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.cluster import nodes_of
from cli.command import _parse, _parser
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "tidegate.yaml"
TIDEGATE = """#!/bin/bash
trap 'touch "$TOLD/'$1'.ended"; exit 0' TERM
printf '%s\\n' "$0" "$@" > "$TOLD/$1.partial"
mv "$TOLD/$1.partial" "$TOLD/$1"
until [ "$1" = "$DIES" ] && [ -e "$TOLD/agent" ] && [ -e "$TOLD/up" ]; do sleep 0.1; done
exit 3
"""
"""It tells its arguments, and stays until it is asked to end."""


def pod() -> dict[str, Any]:
    *_, daemon_set = yaml.safe_load_all(MANIFEST.read_text())
    return dict(daemon_set["spec"]["template"]["spec"])


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """What the container has, whose `tidegate` tells its arguments in a folder."""
    (program := folder / "bin" / "tidegate").parent.mkdir()
    program.write_text(TIDEGATE)
    program.chmod(0o755)
    values = {each["name"]: each.get("value", "10.0.0.7") for each in pod()["containers"][0]["env"]}
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**values, "TOLD": str(folder), "DIES": "", "PATH": path, **changes}


def started(folder: Path, **changes: str) -> subprocess.Popen[bytes]:
    (container,) = pod()["containers"]
    return subprocess.Popen([*container["command"], *container["args"]], env=environment(folder, **changes))


def told(path: Path) -> list[str]:
    while not path.exists():
        time.sleep(0.02)
    return path.read_text().splitlines()[1:]


@pytest.mark.timeout(60)
def test_a_pod_runs_an_agent_and_a_cluster_as_the_commands_take_them(tmp_path: Path) -> None:
    with started(tmp_path, DEVICE="--device cuda") as running:
        agent = _parse(_parser(), told(tmp_path / "agent"))
        up = _parse(_parser(), told(tmp_path / "up"))
        running.terminate()
        assert running.wait() != 0
    assert {path.name for path in tmp_path.glob("*.ended")} == {"agent.ended", "up.ended"}
    assert (agent.listen, agent.device) == ("10.0.0.7:7400", "cuda")
    assert (up.standby, up.foreground, up.address, up.device) == (True, True, "10.0.0.7", "cuda")
    machines = dict(word.split("=") for word in up.machine)
    assert {*nodes_of(up.node)[1].values()} == {*machines}
    mounts = {each["mountPath"]: each for each in pod()["containers"][0]["volumeMounts"]}
    for folder in (agent.credentials, up.machine_credentials, up.gate_root, agent.host_memory_root):
        assert str(folder) in mounts
    assert up.output_dir == "/jobs"

    # Each machine has its credential, in a folder of its address.
    volumes = {each["name"]: each for each in pod()["volumes"]}
    assert mounts["/credentials/node"]["subPathExpr"] == "$(HOST_IP)"
    sources = {
        source["secret"]["name"]: source["secret"]["items"] for source in volumes["nodes"]["projected"]["sources"]
    }
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "a"), tmp_path / "node-a")
    files = {path.name for path in (tmp_path / "node-a").iterdir()}
    for name, address in machines.items():
        host = address.partition(":")[0]
        assert {item["key"]: item["path"] for item in sources[f"node-{name}"]} == {
            each: f"{host}/{each}" for each in files
        }
    assert {each["name"] for each in mounts.values()} == {*volumes}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dies", ["agent", "up"])
def test_the_end_of_one_part_is_the_end_of_the_container(tmp_path: Path, dies: str) -> None:
    with started(tmp_path, DIES=dies) as running:
        assert running.wait() == 1
    assert [path.name for path in tmp_path.glob("*.ended")] == [{"agent": "up.ended", "up": "agent.ended"}[dies]]


def test_a_pod_has_no_rights_that_it_does_not_need() -> None:
    (container,) = pod()["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["securityContext"]["runAsNonRoot"]
    assert not pod()["automountServiceAccountToken"]
    user = re.search(r"useradd --uid (\d+)", (MANIFEST.parents[1] / "Dockerfile").read_text())
    assert user is not None
    assert pod()["securityContext"]["runAsUser"] == int(user[1])
