"""What the launcher of a job and the agents of other machines agree on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tidegate.config.job_config import JobConfig
from tidegate.types import NodeId

BEAT_S = 2.0
"""Both sides of a call say something at least this often."""
LOST_S = 10.0
"""Who hears nothing for so long takes the other side for gone."""
PACKAGES = ("tidegate", "torch", "megatron-core")
"""They have the same versions on all machines of a job, and its folder records them."""


def versions() -> dict[str, str]:
    """By package. Empty for one that is used from a source tree."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def fork_server_socket(config: JobConfig, node: NodeId) -> Path:
    """The socket of a node's fork server on another machine."""
    return Path(config.runtime.host_memory_root) / f"forkserver@{node}.sock"


def boot_id() -> str:
    """Another one after each start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
