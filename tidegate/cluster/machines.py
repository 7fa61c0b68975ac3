"""The other machines of a cluster, and what a job with nodes there has to know. Pure.

A node that no machine names is on the machine of `tidegate up`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Any

from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.config.sections.job import ClusterSection, MachineSection
from tidegate.json_text import typed
from tidegate.types import LOOPBACK, NodeId


@dataclass(frozen=True, slots=True)
class Machines:
    """`address`: of this machine, where the others reach it. `credentials`: the folder of the operator's credential
    that their agents ask for. `gate_root`: the folder of the gates, on a local disk of each machine."""

    address: str = LOOPBACK
    credentials: str = ""
    gate_root: str = ""
    far: tuple[MachineSection, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Machines:
        """From `to_json`. ValueError, KeyError."""
        texts = {name: typed(str, fields[name], name) for name in ("address", "credentials", "gate_root")}
        far = typed(list, fields["far"], "far")
        return cls(**texts, far=tuple(MachineSection.model_validate(each) for each in far))

    def to_json(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "credentials": self.credentials,
            "gate_root": self.gate_root,
            "far": [each.model_dump(mode="json") for each in self.far],
        }

    def with_nodes(self, nodes: Collection[NodeId]) -> Machines:
        """The machines that have some of these nodes, with these alone."""
        far = [
            each.model_copy(update={"nodes": tuple(node for node in each.nodes if node in nodes)}) for each in self.far
        ]
        return replace(self, far=tuple(each for each in far if each.nodes))

    def address_of(self, node: NodeId) -> str:
        """A node of another machine is reached at the address of its agent."""
        return next((host_of(each.agent) for each in self.far if node in each.nodes), self.address)

    def section_of(self, placed: ClusterSection) -> ClusterSection:
        """The section of a job with nodes of the cluster. Where none of them is far it stays as it is."""
        nodes = [NodeId(node) for node in placed.nodes]
        own = self.with_nodes(nodes)
        if not own.far:
            return placed
        return placed.model_copy(
            update={
                "addresses": {str(node): self.address_of(node) for node in nodes},
                "machines": own.far,
                "machine_credentials": self.credentials,
            }
        )


def host_of(agent: str) -> str:
    return agent.rpartition(":")[0]


def is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def far_machine(name: str, agent: str, nodes: Collection[NodeId]) -> MachineSection:
    """ValueError where the name, or the agent's address, cannot be one."""
    host, _, port = agent.rpartition(":")
    if not (is_ipv4(host) and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"machine {name}: {agent!r} is no IPv4 address with a port, as 10.0.0.8:7400")
    try:
        Identity("any", Party.NODE, name)
    except BadIdentity as error:
        raise ValueError(f"machine {name}: {error}") from error
    return MachineSection(name=name, agent=agent, nodes=tuple(nodes))
