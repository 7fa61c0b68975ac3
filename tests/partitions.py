"""Replicated servers on machines of their own, which can be cut off from each other while clients reach them all.

Each machine is a network namespace on one switch, which is a namespace too; the clients are outside. A cut gives each
side a wrong hardware address for the other one: what it sends arrives nowhere, and nobody tells it so. Connections stay
open, as in a partition.

It needs root and iproute2's `ip`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.replicated import NUM_SERVERS, Machine
from tests.two_machines import sh

_SWITCH, _LINK = "tidegate-switch", "tidegate-r"
_NATS, _REDIS = "10.79.1", "10.79.0"
_CLIENTS = 254
_NOWHERE = "02:00:00:00:00:01"
"""The address of no machine."""


def _namespace(number: int) -> str:
    return f"tidegate-r{number}"


MACHINES = tuple(
    Machine(f"{_NATS}.{number + 1}", f"{_REDIS}.{number + 1}", ("ip", "netns", "exec", _namespace(number)))
    for number in range(NUM_SERVERS)
)


@contextmanager
def switched() -> Iterator[None]:
    """The machines, and their links."""
    names = [_namespace(number) for number in range(NUM_SERVERS)]
    made = []
    try:
        for name in (_SWITCH, *names):
            sh(f"ip netns add {name}")
            made.append(name)
        sh(f"ip -n {_SWITCH} link add switch type bridge")
        sh(f"ip -n {_SWITCH} link set switch up")
        _plug(_LINK, _CLIENTS, "")
        for number, name in enumerate(names):
            _plug("eth0", number + 1, f"-n {name}")
            sh(f"ip -n {name} link set lo up")
        yield
    finally:
        if Path("/sys/class/net", _LINK).exists():
            # Else it would stay until the kernel has taken the namespace of its other end apart.
            sh(f"ip link delete {_LINK}")
        for name in made:
            sh(f"ip netns delete {name}")


def _plug(link: str, number: int, where: str) -> None:
    port = f"port{number}"
    sh(f"ip {where} link add {link} type veth peer name {port} netns {_SWITCH}")
    sh(f"ip -n {_SWITCH} link set {port} master switch up")
    for network in (_NATS, _REDIS):
        sh(f"ip {where} addr add {network}.{number}/24 dev {link}")
    sh(f"ip {where} link set {link} up")


@contextmanager
def cut_off(server: str) -> Iterator[None]:
    """The server (`nats1`, `valkey0`) and those of its kind on the other machines do not reach each other. A valkey is
    cut off with the Sentinel of its machine."""
    number, network = int(server[-1]), _NATS if server.startswith("nats") else _REDIS
    others = [other for other in range(NUM_SERVERS) if other != number]
    ways = [(number, other) for other in others] + [(other, number) for other in others]
    wrong = [f"ip -n {_namespace(here)} neigh {{}} {network}.{there + 1} dev eth0" for here, there in ways]
    for command in wrong:
        sh(f"{command.format('replace')} lladdr {_NOWHERE} nud permanent")
    try:
        yield
    finally:
        for command in wrong:
            sh(command.format("delete"))
