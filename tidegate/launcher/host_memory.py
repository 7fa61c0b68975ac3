"""The host memory that a job's versions of the weights take, and whether this machine has it.

A node with GPUs of the rollout or the inference keeps the version in use and the next one, and with a KL term the
reference policy's:

    bytes of a node = versions * parameters * bytes of a weight

GPUs move, so every node counts. The actor's state is there too where it has room (`services.actor.arena_folder`), else
elsewhere. SGLang keeps a copy of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tidegate.job import Job
from tidegate.launcher.claim import CannotStart, host_memory_folder
from tidegate.launcher.left_memory import taken_bytes
from tidegate.sizes import size_text

NUM_VERSIONS = 2


def node_bytes(job: Job) -> int:
    """What one node needs, whichever GPUs it has: they move."""
    num_versions = NUM_VERSIONS + (job.config.algorithm.kl_coefficient > 0)
    return num_versions * job.num_parameters * job.config.actor.precision.itemsize


def check_host_memory(job: Job) -> None:
    """CannotStart where the nodes of this machine need more than is free. A folder that is none is refused later."""
    cluster, root = job.config.cluster, Path(job.config.runtime.host_memory_root)
    if not root.is_dir():
        return
    num_nodes = len(cluster.nodes) - len(cluster.far_nodes())
    needed = num_nodes * node_bytes(job)
    # A killed launcher's files go when the job starts again.
    free = shutil.disk_usage(root).free + taken_bytes(host_memory_folder(job.config))
    if needed > free:
        told = shortage(job, num_nodes, f"{size_text(free)} free")
        raise CannotStart(f"runtime.host_memory_root={root} has {told}; or remove what others left there")


def shortage(job: Job, num_nodes: int, found: str) -> str:
    """The numbers and the remedy, for a machine with some nodes of the job. `found`: what it has."""
    per_node = node_bytes(job)
    versions = f"{NUM_VERSIONS} versions of the weights" + (
        " and the reference policy's" if job.config.algorithm.kl_coefficient else ""
    )
    return (
        f"{found}, and {num_nodes} x {size_text(per_node)} are needed ({versions}, "
        f"{job.num_parameters:,} parameters, on each node): make it larger (mount -o remount,size=..., docker run "
        "--shm-size), or name another folder"
    )
