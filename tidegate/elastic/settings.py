"""How an elastic trainer moves state and how far it checks it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.elastic.certificate import Level


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    seed: int = 0
    """Of the initial weights and of all random numbers."""
    shared_memory: Path | None = None
    """A folder on a tmpfs of each host, owned by whoever outlives the members: ranks of a host then read each other's
    tensors in place, and a dead rank's too. None: everything is sent through torch.distributed, and what only a dead
    rank held is gone."""
    certificate: Level = Level.FULL
    staging_bytes: int = 64 << 20
    """Of staging memory for what is sent, a rank."""
    num_logical_shards: int | None = None
    """Of reproducible updates, see `tidegate.megatron.reproducible`; None: the usual ones."""
    timeout_s: float = 60.0
    """How long members wait for each other's votes."""

    def __post_init__(self) -> None:
        if self.staging_bytes < 1 << 20 or self.timeout_s <= 0:
            raise ValueError(
                f"elastic settings staging_bytes={self.staging_bytes} must be at least {1 << 20} and "
                f"timeout_s={self.timeout_s} positive"
            )
        if self.shared_memory is not None and not self.shared_memory.is_dir():
            raise ValueError(
                f"shared_memory={self.shared_memory} is no folder: make one on a tmpfs, such as under /dev/shm"
            )
