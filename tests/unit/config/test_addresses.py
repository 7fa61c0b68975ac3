"""The addresses of a job's nodes."""

from __future__ import annotations

import re

import pytest

from tests.unit.config.valid_config import VALID, valid_with
from tidegate.config.job_config import ConfigError, parse_config
from tidegate.types import NodeId

NODES = list(VALID["cluster"]["nodes"])
FIRST = NODES[0]


def addresses(*of_nodes: str) -> dict[str, str]:
    return dict(zip(NODES, of_nodes, strict=True))


def test_a_node_without_an_address_is_on_loopback() -> None:
    assert parse_config(VALID).cluster.address_of(NodeId(FIRST)) == "127.0.0.1"
    found = parse_config(valid_with("cluster.addresses", dict.fromkeys(NODES, "10.0.0.7")))
    assert found.cluster.address_of(NodeId(FIRST)) == "10.0.0.7"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (dict.fromkeys([*NODES, "n9"], "10.0.0.7"), "cluster.addresses: n9 not in cluster.nodes"),
        ({"n9": "10.0.0.7"}, f"cluster.addresses: {FIRST}"),
        (dict.fromkeys(NODES, "0.0.0.0"), f"{FIRST}: 0.0.0.0 is no IPv4 address of a machine: give one, as 10.0.0.7"),
        (dict.fromkeys(NODES, "host.example"), f"{FIRST}: host.example is no IPv4 address"),
        (dict.fromkeys(NODES, "fd00::7"), f"{FIRST}: fd00::7 is no IPv4 address"),
        (dict.fromkeys(NODES, "224.0.0.1"), f"{FIRST}: 224.0.0.1 is no IPv4 address"),
    ],
    ids=["an unknown node", "a node without one", "all interfaces", "a name", "IPv6", "multicast"],
)
def test_wrong_addresses_are_refused_with_the_remedy(given: dict[str, str], want: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(want)):
        parse_config(valid_with("cluster.addresses", given))


def test_an_address_that_other_machines_reach_is_a_warning_of_what_listens_there() -> None:
    (warning,) = parse_config(valid_with("cluster.addresses", dict.fromkeys(NODES, "10.0.0.7"))).warnings()
    assert warning.startswith("cluster.addresses: torch's stores and gloo listen on 10.0.0.7 and ask nobody")
    assert parse_config(valid_with("cluster.addresses", dict.fromkeys(NODES, "127.0.0.2"))).warnings() == ()
