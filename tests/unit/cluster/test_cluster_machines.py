"""What a job with nodes on other machines of its cluster has to know."""

from __future__ import annotations

import json

import pytest

from tests.unit.cluster_jobs import config_of
from tidegate.cluster.machines import Machines, far_machine
from tidegate.types import NodeId

N0, N1, N2, N3 = map(NodeId, ("n0", "n1", "n2", "n3"))
MACHINES = Machines(
    "10.0.0.7",
    "/cred",
    "/gates",
    (far_machine("b", "10.0.0.8:7400", [N1, N2]), far_machine("c", "10.0.0.9:7400", [N3])),
)


def test_a_job_knows_the_machines_of_its_own_nodes_alone() -> None:
    placed = config_of("one", {"n0": 2, "n2": 2}, "0,2", "1", "3").cluster
    section = MACHINES.section_of(placed)
    assert section.addresses == {"n0": "10.0.0.7", "n2": "10.0.0.8"}
    assert [each.model_dump() for each in section.machines] == [
        {"name": "b", "agent": "10.0.0.8:7400", "nodes": ("n2",)}
    ]
    assert section.machine_credentials == "/cred"
    assert section.component_placement == placed.component_placement


def test_a_job_on_this_machine_alone_stays_on_loopback() -> None:
    placed = config_of("one", {"n0": 4}, "0", "1,2", "3").cluster
    assert MACHINES.section_of(placed) == placed
    assert Machines().section_of(placed) == placed


def test_machines_survive_their_json() -> None:
    for each in (MACHINES, Machines()):
        assert Machines.of(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize(
    ("name", "agent", "words"),
    [
        ("b", "10.0.0.8", "'10.0.0.8' is no IPv4 address with a port, as 10.0.0.8:7400"),
        ("b", "10.0.0.8:0", "is no IPv4 address with a port"),
        ("b", "hostb:7400", "is no IPv4 address with a port"),
        ("b", ":7400", "is no IPv4 address with a port"),
        ("a b", "10.0.0.8:7400", "machine a b: "),
    ],
)
def test_what_can_be_no_machine_is_refused(name: str, agent: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        far_machine(name, agent, [N1])
