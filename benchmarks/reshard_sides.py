"""The sides that the benchmark of resharding compares, and the meeting of its ranks.

A side is one way from layout to layout: ours, or another. All ranks make it once for each case and call it in the same
way. Ranks meet over a store of the harness, so that a side may end torch's world and begin another. The time of a
switch is known by part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.reshard_state import CPU
from tests.ranks import RankContext
from tidegate.elastic.epoch.rendezvous import connect_store, serve_store, use_interface
from tidegate.elastic.plan.layout import Mesh


class Side(Protocol):
    """One way to switch. Each run calls `prepare`, `switch`, `floor` and sometimes `check`. `close` comes at the
    end."""

    def prepare(self, source: Mesh, target: Mesh) -> None:
        """Put the logical state into the source layout before each run, whatever the last run left."""

    def switch(self) -> dict[str, float]:
        """Move the state into the target layout. Returns this rank's seconds by part."""

    def floor(self) -> dict[str, float]:
        """After a switch: this rank's smallest seconds for the same bytes, by pattern. Empty: they are unknown."""

    def check(self) -> None:
        """AssertionError: a target tensor of this rank differs from the logical state."""

    def close(self) -> None:
        """Give back all memory, files and connections."""


@dataclass(slots=True)
class Crew:
    """The ranks of one case, which meet outside torch's world."""

    rank: int
    size: int
    store: Store
    folder: Path
    """A folder in memory for the files of the sides."""
    timeout_s: float
    device: torch.device
    """That of the tensors of all ranks."""
    _num_meetings: int = 0
    _num_worlds: int = 0

    @classmethod
    def of(cls, context: RankContext, folder: Path, device: torch.device = CPU) -> Crew:
        use_interface("lo")
        fd, timeout_s = context.listen_fd, context.timeout_s
        store = connect_store(context.port, timeout_s=timeout_s) if fd is None else serve_store(fd, timeout_s=timeout_s)
        return cls(context.rank, context.world_size, store, folder, timeout_s, device)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._num_meetings += 1
        key = f"met/{self._num_meetings}"
        if self.store.add(key, 1) == self.size:
            self.store.set(f"{key}/all", "")
        self.store.wait([f"{key}/all"])

    def part(self) -> None:
        """The last call of all ranks. The rank that serves the store ends after the others."""
        if self.rank:
            self.store.set(f"parted/{self.rank}", "")
        else:
            self.store.wait([f"parted/{rank}" for rank in range(1, self.size)])

    def new_world(self) -> Store:
        """A store for the next torch world. All ranks call it, also those outside that world, so that their counts
        agree."""
        self._num_worlds += 1
        return PrefixStore(f"world/{self._num_worlds}", self.store)


@dataclass(slots=True)
class Parts:
    """Seconds by part of one switch."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
