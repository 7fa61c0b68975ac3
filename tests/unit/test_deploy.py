"""The systemd units of an agent and of a cluster, and what an inventory may set."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cli.cluster import machines_of, nodes_of
from cli.command import _parse, _parser
from cli.usage import BadUsage

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ROLE = DEPLOY / "ansible" / "roles" / "tidegate"
PAGE = DEPLOY.parent / "docs" / "deploy.md"
AGENT, CLUSTER = (DEPLOY / f"tidegate-{name}@.service" for name in ("agent", "cluster"))


def command_of(unit: Path, **variables: str) -> list[str]:
    """As systemd splits it: a variable without braces is several words."""
    (command,) = re.findall(r"^ExecStart=/opt/tidegate/bin/tidegate (.*)$", unit.read_text(), re.MULTILINE)
    words: list[str] = []
    for word in command.split():
        name = word.strip("${}")
        words += [word] if "$" not in word else [variables[name]] if "{" in word else variables[name].split()
    return words


def environment(*, with_machines: bool) -> dict[str, str]:
    """What cluster.env says, or with the line for other machines."""
    lines = (DEPLOY / "cluster.env").read_text().splitlines()
    found = dict(line.partition("=")[::2] for line in lines if line[:1].isupper())
    if with_machines:
        found |= dict(line.removeprefix("# ").partition("=")[::2] for line in lines if line.startswith("# OPTIONS"))
        (found["NODES"],) = (part for line in lines for part in re.findall(r'NODES=("n0=8 n1.*?")', line))
    return {name: shlex.split(value)[0] for name, value in found.items()}


def test_the_unit_starts_an_agent_as_the_command_takes_it() -> None:
    args = _parse(_parser(), command_of(AGENT, LISTEN="10.0.0.8:7400", OPTIONS="--device cuda"))
    assert (args.command, args.listen, args.credentials) == ("agent", "10.0.0.8:7400", Path("/etc/tidegate/node"))
    assert args.device == "cuda"
    assert _parse(_parser(), command_of(AGENT, LISTEN="10.0.0.8:7400", OPTIONS="")).device == "cpu"


def test_the_unit_starts_a_cluster_as_the_command_takes_it() -> None:
    args = _parse(_parser(), command_of(CLUSTER, **environment(with_machines=False)))
    assert (args.command, args.node, args.foreground) == ("up", ["n0=8"], True)
    assert machines_of(args, nodes_of(args.node)[1])[0].far == ()


def test_the_example_of_other_machines_lacks_only_the_machine() -> None:
    args = _parse(_parser(), command_of(CLUSTER, **environment(with_machines=True)))
    machine_by_node = nodes_of(args.node)[1]
    assert machine_by_node == {"n1": "b"}
    with pytest.raises(BadUsage, match=r"10\.0\.0\.7 is no address of this machine"):
        machines_of(args, machine_by_node)


def test_both_units_are_hardened_alike_and_keep_gates_in_the_same_place() -> None:
    agent, cluster = (unit.read_text().partition("LimitNOFILE")[2] for unit in (AGENT, CLUSTER))
    assert agent == cluster
    assert "StateDirectory=tidegate tidegate/gates\n" in agent
    assert "--gate-root /var/lib/tidegate/gates" in environment(with_machines=True)["OPTIONS"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="it needs systemd-analyze")
@pytest.mark.parametrize("source", [AGENT, CLUSTER], ids=["agent", "cluster"])
def test_systemd_finds_no_fault_in_a_unit_but_a_program_that_is_not_installed_here(
    source: Path, tmp_path: Path
) -> None:
    unit = tmp_path / source.name.replace("@", "@root")
    unit.write_text(source.read_text().replace("/opt/tidegate/bin/tidegate", "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", unit], stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def variables() -> dict[str, object]:
    """What an inventory may set, with the defaults."""
    text = (ROLE / "defaults" / "main.yml").read_text()
    return dict(yaml.safe_load(text.partition("# Not to be set")[0]))


def test_the_page_names_every_variable_of_an_inventory() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `tidegate_")]
    assert sorted(re.findall(r"`(tidegate_\w+)`", "".join(rows))) == sorted(variables())


def test_the_example_of_an_inventory_sets_variables_that_there_are() -> None:
    everything = yaml.safe_load((DEPLOY / "ansible" / "inventory.example.yml").read_text())["all"]
    groups = everything["children"]
    assert set(groups) == {"tidegate_keeper", "tidegate_machines"}
    hosts = {name: host for group in groups.values() for name, host in group["hosts"].items()}
    names = {name for variables in (everything["vars"], *hosts.values()) for name in variables}
    assert {name for name in names if name.startswith("tidegate_")} <= {*variables(), "tidegate_nodes"}
