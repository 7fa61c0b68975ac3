"""Where a job's GPUs lie in a cluster. Pure.

A config counts its GPUs from 0 over nodes of its own. In a cluster each of them is another one: those of one node of
the config lie on one node of the cluster, in order, the lowest free ones first. Several nodes of a config may share a
node of the cluster.

Invariants:
- A placed job has only free GPUs, each once. [test_placement: has_only_free_gpus]
- GPUs of one node stay together. [test_placement: of_one_node_stay_together]
- The placed config has the layouts and the rank order of the submitted one. [test_placement: keeps_the_order_of_ranks]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tidegate.cluster.slots import Slots
from tidegate.config.gpu_lists import gpu_indices
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.types import GpuId, NodeId, Role, gpu_id, node_of


def cluster_gpus(nodes: Mapping[NodeId, int]) -> tuple[GpuId, ...]:
    """All slots of a cluster, in order."""
    return tuple(gpu_id(node, index) for node, count in nodes.items() for index in range(count))


def needs_of(config: JobConfig) -> tuple[int, ...]:
    """The number of GPUs that the job has on each node of its config, in the order of `config.gpus`."""
    return tuple(Counter(node_of(gpu) for gpu in config.gpus).values())


def placed_gpus(needs: Sequence[int], nodes: Mapping[NodeId, int], free: Collection[GpuId]) -> tuple[GpuId, ...] | None:
    """Free GPUs of the cluster for those of a config, in its order. None: there are too few. Larger nodes of the config
    choose first."""
    left = {node: [gpu for gpu in cluster_gpus({node: nodes[node]}) if gpu in free] for node in nodes}
    places: dict[int, list[GpuId]] = {}
    for place in sorted(range(len(needs)), key=lambda each: -needs[each]):
        # The fullest node that has room, so that whole nodes stay free for jobs that need them.
        fitting = [node for node in nodes if len(left[node]) >= needs[place]]
        if not fitting:
            return None
        node = min(fitting, key=lambda each: len(left[each]))
        places[place], left[node] = left[node][: needs[place]], left[node][needs[place] :]
    return tuple(gpu for place in range(len(needs)) for gpu in places[place])


def placed_config(config: JobConfig, slots: Slots, gpus: tuple[GpuId, ...]) -> JobConfig:
    """The config with those nodes of the cluster that it has GPUs of, and with `gpus` for its own. ConfigError where it
    does not fit there."""
    if (fault := _other_cluster(config, slots)) is not None:
        raise ConfigError(fault)
    nodes = {node: count for node, count in slots.nodes.items() if node in set(map(node_of, gpus))}
    at = {gpu: index for index, gpu in enumerate(cluster_gpus(nodes))}
    own = config.cluster.gpus()
    there = dict(zip(config.gpus, gpus, strict=True))

    def moved(text: str) -> str:
        return ",".join(str(at[there[own[index]]]) for index in gpu_indices(text)) if text else ""

    fields = config.model_dump(mode="json")
    fields["cluster"]["nodes"] = nodes
    placement = fields["cluster"]["component_placement"]
    for role in Role:
        placement[role] = moved(placement[role])
    for component in ("actor", "rollout"):
        fields[component]["standby"] = moved(fields[component]["standby"])
    return parse_config(fields)


def misfit(config: JobConfig, slots: Slots) -> str | None:
    """Why the job can never run in this cluster, with the numbers. None: it can."""
    if (fault := _other_cluster(config, slots)) is not None:
        return fault
    every = cluster_gpus(slots.nodes)
    found = placed_gpus(needs_of(config), slots.nodes, every)
    if found is None:
        own = Counter(node_of(gpu) for gpu in config.gpus)
        needs = ", ".join(f"{count} on {node}" for node, count in own.items())
        has = ", ".join(f"{node} has {count}" for node, count in slots.nodes.items())
        return (
            f"job {config.job} needs {len(config.gpus)} GPUs ({needs}), those of a node together; {has}: give it "
            "fewer, or submit it to a larger cluster"
        )
    try:
        placed_config(config, slots, found)
    except ConfigError as error:
        return f"job {config.job} does not fit the cluster's nodes: {error}"
    return None


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
