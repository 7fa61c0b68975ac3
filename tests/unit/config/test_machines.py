"""Nodes of a job on other machines."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.config.valid_config import VALID
from tidegate.config.job_config import ConfigError, parse_config

NODES = list(VALID["cluster"]["nodes"])
LAST = NODES[-1]


def machine(name: str, agent: str = "127.0.0.9:7400", *nodes: str) -> dict[str, Any]:
    return {"name": name, "agent": agent, "nodes": list(nodes or (LAST,))}


def raw(**changes: Any) -> dict[str, Any]:
    """A job whose last node is on machine `b`. Dotted keys change it."""
    cluster = {
        **VALID["cluster"],
        "addresses": {node: f"127.0.0.{at}" for at, node in enumerate(NODES, 2)},
        "machines": [machine("b")],
        "machine_credentials": "operator",
    }
    found = {**VALID, "cluster": cluster, "runtime": {**VALID.get("runtime", {}), "gate_root": "gates"}}
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        found[section] = {**found.get(section, {}), key: value}
    return found


def test_a_node_is_on_the_machine_that_names_it_and_the_others_are_here() -> None:
    cluster = parse_config(raw()).cluster
    assert cluster.machine_of(LAST) == cluster.machines[0]
    assert [cluster.machine_of(node) for node in NODES[:-1]] == [None] * (len(NODES) - 1)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"cluster__machines": [machine("b", "b:1", "n9")]}, "cluster.machines: n9 not in cluster.nodes"),
        (
            {"cluster__machines": [machine("b"), machine("c")]},
            f"cluster.machines: {LAST} is on two of them: name it once",
        ),
        ({"cluster__machines": [machine("b", "b")]}, "cluster.machines: b: agent=b is not host:port"),
        ({"cluster__machines": [machine("B_")]}, "name 'B_' of a credential"),
        ({"cluster__addresses": {}}, "cluster.machines: its nodes are reached by cluster.addresses"),
        ({"cluster__machine_credentials": ""}, "agents ask for a credential: set cluster.machine_credentials"),
        ({"runtime__gate_root": ""}, "gates are on local disks: set runtime.gate_root to a folder of each machine"),
        (
            {"runtime__gate_root": "jobs/gates"},
            "runtime.gate_root=jobs/gates is in output_dir=jobs, which the machines share",
        ),
        (
            {"cluster__machines": [machine("b", "10.0.0.9:7400")]},
            "cluster.machines: b is at 10.0.0.9, and reaches no address of loopback",
        ),
        (
            {"cluster__addresses": dict.fromkeys(NODES, "10.0.0.7")},
            "embedded servers listen on loopback alone: set servers.nats_url and servers.redis_url",
        ),
    ],
)
def test_wrong_machines_are_refused_with_the_remedy(changes: dict[str, Any], want: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(want)):
        parse_config(raw(**changes))
