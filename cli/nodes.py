"""The nodes of a cluster: `tidegate get nodes`, `describe node`, and `drain` for one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from cli import cluster_queue
from cli.cluster_access import NoCluster, cluster_of
from cli.rows import Form, Row, answer_text, written
from cli.usage import BadUsage
from tidegate.cluster.folder import ClusterFolder
from tidegate.job import JobFolder
from tidegate.ports.rpc import PeerRefused
from tidegate.sizes import host_memory_text
from tidegate.types import GpuId, NodeId, node_of
from tidegate.v1 import cluster_pb2, machine_pb2

NODE_COLUMNS = ("node", "state", "machine", "slots", "free", "jobs", "message")
_GIB = 2**30


def node_rows(
    there: cluster_pb2.ListClusterGpusResponse,
    submissions: Iterable[cluster_pb2.Submission],
    names: Collection[str] = (),
) -> list[Row]:
    """One row a node: its slots, those that no job has, and its jobs. `names`: only these nodes, and those of these
    jobs. BadUsage: there is no such node or job."""
    submissions = list(submissions)
    job_of = {gpu: each.job for each in submissions for gpu in each.gpus}
    by_node: dict[NodeId, list[str]] = {}
    for gpu in there.gpus:
        # A job has its slots from its placement on, and what it left behind belongs to it in the ownership map.
        by_node.setdefault(node_of(GpuId(gpu.gpu)), []).append(job_of.get(gpu.gpu) or gpu.job)
    away = {each.node: each for each in there.away}
    machines, keeper = there.places.machines, there.places.keeper
    rows: list[Row] = [
        {
            "node": node,
            "state": "away" if node in away else "drained" if node in there.drained_nodes else "ready",
            "machine": machines.get(node) or None,
            "slots": len(owners),
            "free": 0 if node in away else owners.count(""),
            "jobs": sorted({*filter(None, owners)}),
            "message": _message(
                away.get(node),
                keeps_jobs=node in there.nodes_keeping_jobs and any(owners),
                is_keepers=bool(keeper) and machines.get(node) == keeper,
            ),
        }
        for node, owners in by_node.items()
    ]
    known = {*by_node, *(each.job for each in submissions)}
    if by_node and (unknown := sorted({*names} - known)):
        raise BadUsage(f"the cluster has no node or job {', '.join(unknown)}; its nodes are {', '.join(by_node)}")
    return [row for row in rows if not names or row["node"] in names or not set(row["jobs"]).isdisjoint(names)]


def _message(away: cluster_pb2.NodeAway | None, *, keeps_jobs: bool, is_keepers: bool) -> str:
    if away is not None:
        return f"for {away.seconds:.0f} s: {away.reason}"
    told = (("its jobs stay until they end", keeps_jobs), ("its machine keeps the cluster", is_keepers))
    return "; ".join(text for text, is_so in told if is_so)


async def drain_node(node: str, output_dir: Path, form: Form, *, undo: bool, keeps_jobs: bool) -> int:
    """Takes a node away from the cluster's jobs, or gives it back. NoCluster."""
    try:
        async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
            answer = await cluster.DrainNode(cluster_pb2.DrainNodeRequest(node=node, undo=undo, keeps_jobs=keeps_jobs))
    except PeerRefused as refused:
        if not JobFolder(output_dir / node).config.is_file():
            raise
        hint = f"{node} is a job, of which GPUs are drained: tidegate drain {node} n0/3"
        raise BadUsage(f"{refused.reason}; {hint}") from refused
    except NoCluster as error:
        raise NoCluster(f"{error}; to drain GPUs of a job, name them too: tidegate drain {node} n0/3") from error
    keeps = node in answer.nodes_keeping_jobs
    theirs = "stay until they end or are interrupted" if keeps else "go on elsewhere once there is room"
    how = "takes jobs again" if undo else f"gets no jobs, and those on it {theirs}"
    row: Row = {"node": node, "drained_nodes": list(answer.drained_nodes), "keeps_jobs": keeps}
    print(answer_text(row, f"node {node} {how}", form))
    return 0


async def describe_node(word: str, node: str, output_dir: Path, form: Form) -> int:
    """`describe node n1`. BadUsage, NoCluster, PeerUnavailable: its machine does not answer."""
    if word != "node":
        raise BadUsage(
            f"describe takes no {node}; `tidegate describe --help` lists the arguments: a job, or a node as in "
            "describe node n0"
        )
    async with cluster_of(ClusterFolder.of(output_dir)) as stub:
        there = await stub.ListClusterGpus(cluster_pb2.ListClusterGpusRequest())
        found = await stub.GetNodeMachine(cluster_pb2.GetNodeMachineRequest(node=node))
    known = await cluster_queue.submissions(output_dir)
    (row,) = (each for each in node_rows(there, known) if each["node"] == node)
    needs = {each.job: each.node_bytes for each in known if any(node_of(GpuId(gpu)) == node for gpu in each.gpus)}
    description = {**row, "host_memory_bytes_of": needs, "machine": {**_machine_row(found), "name": row["machine"]}}
    if form is not Form.TABLE:
        print(written(description, form))
        return 0
    jobs = ", ".join(f"{job}{host_memory_text(needs.get(job, 0), before=' with ')}" for job in row["jobs"]) or "none"
    print(f"node {node}: {row['state']}, {row['free']} of {row['slots']} slots free, jobs: {jobs}")
    if row["message"]:
        print(f"away {row['message']}" if row["state"] == "away" else row["message"])
    print(_machine_text(found))
    return 0


def _machine_row(found: cluster_pb2.GetNodeMachineResponse) -> Row:
    there, named = found.machine, {"name": found.name or None, "agent": found.agent or None}
    if not found.HasField("machine"):
        return named
    return {
        **named,
        "hostname": there.hostname,
        "addresses": list(there.addresses),
        "cores": there.num_cores,
        "memory_bytes": there.memory.total_bytes,
        "memory_available_bytes": there.memory.available_bytes,
        "host_memory_root": there.host_memory_root,
        "host_memory_bytes": there.host_memory.total_bytes,
        "host_memory_available_bytes": there.host_memory.available_bytes,
        "cuda_devices": [{"name": each.name, "bytes": each.total_bytes} for each in there.cuda_devices],
        "versions": dict(there.versions),
    }


def _machine_text(found: cluster_pb2.GetNodeMachineResponse) -> str:
    there = found.machine
    if not found.HasField("machine"):
        return f"machine {found.name}, its agent at {found.agent}"
    where = f"machine {found.name}, its agent at {found.agent}" if found.name else "the machine that keeps the cluster"
    versions = ", ".join(
        f"{package} {version or '(source tree)'}" for package, version in sorted(there.versions.items())
    )
    return "\n".join(
        (
            f"{where}: host {there.hostname}, {there.num_cores:g} cores",
            f"memory {_told(there.memory)}; {there.host_memory_root} {_told(there.host_memory)}",
            f"addresses {', '.join(there.addresses)}",
            *([f"GPUs {_gpus_text(there.cuda_devices)}"] if there.cuda_devices else []),
            f"versions {versions}",
        )
    )


def _gpus_text(devices: Iterable[machine_pb2.CudaDevice]) -> str:
    kinds = Counter(f"{each.name} ({each.total_bytes / _GIB:.0f} GiB)" for each in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _told(memory: machine_pb2.Memory) -> str:
    return f"{memory.total_bytes / _GIB:.1f} GiB, {memory.available_bytes / _GIB:.1f} available"
