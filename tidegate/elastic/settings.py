"""The settings of an elastic trainer: how it moves state and how much it checks. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidegate.elastic.check.level import Level


class CopyTo(StrEnum):
    """Where the state of the last updates is kept, in addition to the tensors in training."""

    NOWHERE = "nowhere"
    """A death while an update is applied loses the state. Without shared memory any death does."""
    NODE = "node"
    """Each rank keeps its two last copies in its host's memory. After a half-applied update the job returns to the last
    whole one.
    """
    PEER = "peer"
    """As NODE; and another rank of the layout keeps them too, on another host if possible. A whole node may then be
    lost.
    """


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    seed: int = 0
    """The seed of the initial weights and of all random numbers."""
    shared_memory: Path | None = None
    """A folder on a tmpfs of each host. Its owner must outlive the members.

    The ranks of a host then read each other's tensors in place, and those of a dead rank too. None: torch.distributed
    sends everything, and the tensors that only a dead rank held are lost.
    """
    host_memory: Path | None = None
    """A folder on a tmpfs of each host, as `shared_memory`, for copies, and for a suspended job's state that trains
    elsewhere.

    The copies of a member that dies are then there, and its state if it dies while the job is suspended. None: each
    member keeps its own part in private memory. Unused where `shared_memory` is set: the state is there already.
    """
    keeps_last: bool = True
    """Whether members keep memory of the last layout, so that a switch back does not take it anew.

    In shared memory, the tensors' is kept. It then exists beside the gradients of the present layout: a rank's peak
    grows by its gradients. Elsewhere, as on a device, that of the copies is kept, and no peak grows.
    """
    copies: CopyTo = CopyTo.NOWHERE
    copy_every: int = 1
    """The number of updates from one copy to the next."""
    certificate: Level = Level.FULL
    proves_late: bool = False
    """Whether a switch is checked beside the first micro-batches in its layout, and not before it (`late_proof`).

    Only where every rank's tensors are in shared memory, the last layout's memory is kept, and no rank leaves.
    """
    staging_bytes: int = 64 << 20
    """The staging memory of each rank for the tensors that it sends and receives."""
    num_logical_shards: int | None = None
    """The logical shards of reproducible updates, see `tidegate.megatron.reproducible`. None: ordinary updates."""
    timeout_s: float = 60.0
    """How long members wait for each other's votes."""

    def __post_init__(self) -> None:
        if self.staging_bytes < 1 << 20 or self.timeout_s <= 0:
            raise ValueError(
                f"elastic settings staging_bytes={self.staging_bytes} must be at least {1 << 20} and "
                f"timeout_s={self.timeout_s} positive"
            )
        if self.copy_every < 1:
            raise ValueError(f"copy_every={self.copy_every} must be 1 or more updates; copies=nowhere makes no copies")
        for name, folder in (("shared_memory", self.shared_memory), ("host_memory", self.host_memory)):
            if folder is not None and not folder.is_dir():
                raise ValueError(f"{name}={folder} is not a folder: make one on a tmpfs, such as under /dev/shm")
