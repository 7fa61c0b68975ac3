"""Where a job's GPUs lie in a cluster. Pure.

A config counts its GPUs from 0 over nodes of its own. In a cluster each of them is another one: those of one node of
the config lie on one node of the cluster, in order, the lowest free ones first. Several nodes of a config may share a
node of the cluster. On each node of the cluster that it has, a job needs the same host memory, which all nodes of a
machine share.

Invariants:
- A placed job has only free GPUs, each once. [test_placement: has_only_free_gpus]
- GPUs of one node stay together. [test_placement: of_one_node_stay_together]
- Jobs of a machine need no more host memory than it has. [test_placement: no_more_host_memory_than]
- The placed config has the layouts and the rank order of the submitted one. [test_placement: keeps_the_order_of_ranks]
- No key of servers of its own decides how a job uses those of the cluster. [test_placement: servers_of_its_own]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tidegate.cluster.slots import Slots
from tidegate.config.gpu_lists import gpu_indices
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.sections.job import ServersSection
from tidegate.sizes import size_text
from tidegate.types import GpuId, NodeId, Role, gpu_id, node_of


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the nodes of one machine share, or what is left of it."""

    nodes: tuple[NodeId, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What jobs may take: free GPUs, and the host memory of machines. A node without one has as much as is asked."""

    nodes: Mapping[NodeId, int]
    free: frozenset[GpuId]
    memory: tuple[HostMemory, ...] = ()

    @classmethod
    def whole(cls, nodes: Mapping[NodeId, int], memory: tuple[HostMemory, ...] = ()) -> Self:
        return cls(nodes, frozenset(cluster_gpus(nodes)), memory)

    def bytes_on(self, node: NodeId) -> float:
        return next((each.num_bytes for each in self.memory if node in each.nodes), float("inf"))

    def without(self, *jobs: tuple[Collection[GpuId], int]) -> Room:
        """After these jobs took their GPUs, and host memory on each of their nodes."""
        taken: Counter[NodeId] = Counter()
        for gpus, node_bytes in jobs:
            taken.update(dict.fromkeys(map(node_of, gpus), node_bytes))
        memory = tuple(
            replace(each, num_bytes=each.num_bytes - sum(taken[node] for node in each.nodes)) for each in self.memory
        )
        return replace(self, free=self.free.difference(*(gpus for gpus, _ in jobs)), memory=memory)


def cluster_gpus(nodes: Mapping[NodeId, int]) -> tuple[GpuId, ...]:
    """All slots of a cluster, in order."""
    return tuple(gpu_id(node, index) for node, count in nodes.items() for index in range(count))


def needs_of(config: JobConfig) -> tuple[int, ...]:
    """The number of GPUs that the job has on each node of its config, in the order of `config.gpus`."""
    return tuple(Counter(node_of(gpu) for gpu in config.gpus).values())


def placed_gpus(needs: Sequence[int], room: Room, *, node_bytes: int = 0) -> tuple[GpuId, ...] | None:
    """Free GPUs of the cluster for those of a config, in its order. None: none were found. `node_bytes`: the host
    memory that each node of the cluster has to have for it."""
    found = _chosen(needs, room, node_bytes, is_close=False)
    # On fewer nodes it needs less memory.
    return _chosen(needs, room, node_bytes, is_close=True) if found is None and node_bytes else found


def _chosen(needs: Sequence[int], room: Room, node_bytes: int, *, is_close: bool) -> tuple[GpuId, ...] | None:
    """Larger nodes of the config choose first: the fullest node that has room, so that whole nodes stay free for jobs
    that need them. `is_close`: one that the job has already, then the emptiest."""
    left = {node: [gpu for gpu in cluster_gpus({node: room.nodes[node]}) if gpu in room.free] for node in room.nodes}
    places: dict[int, list[GpuId]] = {}
    its_own: set[NodeId] = set()
    for place in sorted(range(len(needs)), key=lambda each: -needs[each]):
        fitting = [
            node
            for node in room.nodes
            if len(left[node]) >= needs[place]
            and (not node_bytes or node in its_own or room.bytes_on(node) >= node_bytes)
        ]
        if not fitting:
            return None
        if is_close:
            node = min(fitting, key=lambda each: (each not in its_own, -len(left[each])))
        else:
            node = min(fitting, key=lambda each: len(left[each]))
        if node_bytes and node not in its_own:
            room = room.without((left[node][:1], node_bytes))
            its_own.add(node)
        places[place], left[node] = left[node][: needs[place]], left[node][needs[place] :]
    return tuple(gpu for place in range(len(needs)) for gpu in places[place])


def placed_config(config: JobConfig, slots: Slots, gpus: tuple[GpuId, ...]) -> JobConfig:
    """The config with those nodes of the cluster that it has GPUs of, with `gpus` for its own, and without servers.
    ConfigError where it does not fit there."""
    if (fault := _other_cluster(config, slots)) is not None:
        raise ConfigError(fault)
    nodes = {node: count for node, count in slots.nodes.items() if node in set(map(node_of, gpus))}
    at = {gpu: index for index, gpu in enumerate(cluster_gpus(nodes))}
    own = config.cluster.gpus()
    there = dict(zip(config.gpus, gpus, strict=True))

    def moved(text: str) -> str:
        return ",".join(str(at[there[own[index]]]) for index in gpu_indices(text)) if text else ""

    fields = config.model_dump(mode="json")
    # An earlier release took configs with servers of their own into its queue, and backups have them.
    del fields["servers"]
    fields["cluster"]["nodes"] = nodes
    placement = fields["cluster"]["component_placement"]
    for role in Role:
        placement[role] = moved(placement[role])
    for component in ("actor", "rollout"):
        fields[component]["standby"] = moved(fields[component]["standby"])
    return parse_config(fields)


def misfit(config: JobConfig, slots: Slots, *, node_bytes: int = 0, memory: tuple[HostMemory, ...] = ()) -> str | None:
    """Why the job can never run in this cluster, with the numbers. None: it can. `node_bytes`: the host memory that it
    needs on each node. `memory`: of machines, as far as it is known."""
    if (fault := own_servers_fault(config) or _other_cluster(config, slots)) is not None:
        return fault
    needs, room = needs_of(config), Room.whole(slots.nodes, memory)
    found = placed_gpus(needs, room, node_bytes=node_bytes)
    if found is None and placed_gpus(needs, Room.whole(slots.nodes)) is not None:
        return (
            f"job {config.job} needs {size_text(node_bytes)} of host memory on each of its nodes; "
            f"{memory_told(memory)}: make it larger there (mount -o remount,size=..., docker run --shm-size)"
        )
    if found is None:
        own = Counter(node_of(gpu) for gpu in config.gpus)
        needed = ", ".join(f"{count} on {node}" for node, count in own.items())
        has = ", ".join(f"{node} has {count}" for node, count in slots.nodes.items())
        return (
            f"job {config.job} needs {len(config.gpus)} GPUs ({needed}), those of a node together; {has}: give it "
            "fewer, or submit it to a larger cluster"
        )
    try:
        placed_config(config, slots, found)
    except ConfigError as error:
        return f"job {config.job} does not fit the cluster's nodes: {error}"
    return None


def own_servers_fault(config: JobConfig) -> str | None:
    """Why a job with servers of its own is not submitted. Their URLs may have passwords: only keys are named."""
    default = ServersSection()
    own = [
        f"servers.{key}" for key in ServersSection.model_fields if getattr(config.servers, key) != getattr(default, key)
    ]
    if not own:
        return None
    return (
        f"job {config.job} has {', '.join(own)}, and a cluster has its own servers: leave servers out, or start the "
        "job by tidegate run, which uses yours"
    )


def memory_told(memory: Iterable[HostMemory]) -> str:
    """By machine, for people."""
    told = []
    for each in memory:
        verb = "together have" if len(each.nodes) > 1 else "has"
        told.append(f"{' and '.join(each.nodes)} {verb} {size_text(each.num_bytes)}")
    return ", ".join(told)


def _other_cluster(config: JobConfig, slots: Slots) -> str | None:
    """How what the job says of its slots and nodes differs from what the cluster has."""
    if config.cluster.addresses or config.cluster.machines:
        key = "cluster.machines" if config.cluster.machines else "cluster.addresses"
        return f"job {config.job} has {key}, and the cluster's nodes have their own: leave it out"
    if config.cluster.device != slots.device:
        return (
            f"job {config.job} needs cluster.device={config.cluster.device}, and the cluster's slots are {slots.device}"
        )
    if (num_sharing := config.cluster.slots_per_gpu) != slots.per_gpu:
        return (
            f"job {config.job} has cluster.slots_per_gpu={num_sharing}, and in the cluster {slots.per_gpu} slots share "
            f"a GPU: submit it with cluster.slots_per_gpu={slots.per_gpu}, or start the cluster with "
            f"tidegate up --slots-per-gpu {num_sharing}"
        )
    return None
