"""How an elastic trainer moves state and how far it checks it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidegate.elastic.check.certificate import Level


class CopyTo(StrEnum):
    """Where the state of the last updates is kept besides the tensors that are trained."""

    NOWHERE = "nowhere"
    """A death while an update is applied takes the state with it; so does any without shared memory."""
    NODE = "node"
    """Each rank keeps the two last in its host's memory: what is left half applied goes back to the last whole one."""
    PEER = "peer"
    """And another rank of the layout keeps them too, on another host where it can: for nodes that may be lost whole."""


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    seed: int = 0
    """Of the initial weights and of all random numbers."""
    shared_memory: Path | None = None
    """A folder on a tmpfs of each host, owned by whoever outlives the members: ranks of a host then read each other's
    tensors in place, and a dead rank's too. None: everything is sent through torch.distributed, and what only a dead
    rank held is gone."""
    keeps_last: bool = True
    """Whether members keep the shared memory of the layout that was left last, so that a switch back takes none anew.
    It is held beside the gradients of the present one: the most that a rank has at once grows by its gradients."""
    copies: CopyTo = CopyTo.NOWHERE
    copy_every: int = 1
    """Updates from one copy to the next."""
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
        if self.copy_every < 1:
            raise ValueError(f"copy_every={self.copy_every} must be 1 or more updates; copies=nowhere makes no copies")
        if self.shared_memory is not None and not self.shared_memory.is_dir():
            raise ValueError(
                f"shared_memory={self.shared_memory} is no folder: make one on a tmpfs, such as under /dev/shm"
            )
