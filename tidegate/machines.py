"""What the launcher of a job and the agents of other machines agree on."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import tidegate
from tidegate.config.job_config import JobConfig
from tidegate.types import NodeId

BEAT_S = 2.0
"""Both sides of a call say something at least this often."""
LOST_S = 10.0
"""Who hears nothing for so long takes the other side for gone."""
PACKAGES = ("tidegate", "torch", "megatron-core")
"""They have the same versions on all machines of a job, and its folder records them."""


@cache
def versions() -> dict[str, str]:
    """By package. Empty for one that is not installed."""
    return {name: _version(name) for name in PACKAGES} | {"tidegate": release()}


@cache
def release() -> str:
    """The version of Tidegate, with a digest of its modules: two releases of one version differ. From a source tree it
    has none, nor where Tidegate is not installed."""
    own = _version("tidegate")
    record = (distribution("tidegate").read_text("RECORD") or "") if own else ""
    # The modules alone: what else a wheel installs has the environment's path in it.
    modules = sorted(line for line in record.splitlines() if line.partition(",")[0].endswith(".py"))
    if not any(line.startswith("tidegate/machines.py,") for line in modules):
        return own
    return f"{own}+{hashlib.sha256(chr(10).join(modules).encode()).hexdigest()[:10]}"


def own_modules() -> str:
    """The folder of this release's modules."""
    return str(Path(tidegate.__file__).parents[1])


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
