"""Where the actor's members on a node keep their state: in files in memory that they all read, or each for itself.

What lies in such files is read in place by the others of the node and outlives a member that dies. They are in the
job's folder in host memory, which the launcher removes at the end of a run, or at the next start where it could not.
Each member decides alone: state that any of them keeps for itself is sent instead, which is slower and not wrong.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tidegate.elastic.settings import CopyTo
from tidegate.elastic.state.copies import NUM_SLOTS
from tidegate.types import Precision

_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")
_OPTIMIZER_BYTES = {Precision.FP32: 8, Precision.BF16: 12}
"""Of a parameter: Adam's moments, and where the weights are not in fp32 the main parameter."""


@dataclass(frozen=True, slots=True)
class Choice:
    folder: Path | None
    """None: each for itself."""
    reason: str


def most_bytes(num_parameters: int, *, num_members: int, copies: CopyTo, precision: Precision) -> int:
    """What a node's members hold at most, in the middle of a reshard: two layouts, in which each has all the weights
    and all have the optimizer's state between them, besides two copies of that, or as many again of others'."""
    num_copies = {CopyTo.NOWHERE: 0, CopyTo.NODE: NUM_SLOTS, CopyTo.PEER: 2 * NUM_SLOTS}[copies]
    return 2 * (1 + num_copies) * num_parameters * (num_members * precision.itemsize + _OPTIMIZER_BYTES[precision])


def choose(folder: Path, *, needed_bytes: int, device: torch.device) -> Choice:
    """`folder`, made where it serves."""
    if device.type != "cpu":
        return Choice(None, f"state is on {device}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = file_system(folder, _MOUNTS.read_text())
    if kind not in _IN_MEMORY:
        return Choice(None, f"state is not shared: {folder} is on {kind}, not in memory; set runtime.host_memory_root")
    space = os.statvfs(folder)
    room_bytes = space.f_bavail * space.f_frsize + _taken_bytes(folder)
    if room_bytes < needed_bytes:
        return Choice(
            None,
            f"state is not shared: it takes up to {needed_bytes} bytes in {folder}, which has {room_bytes}: give it "
            "more room (docker run --shm-size)",
        )
    return Choice(folder, f"state is shared in {folder}: up to {needed_bytes} of {room_bytes} bytes")


def file_system(path: Path, mounts: str) -> str:
    """The kind of the one that `path` is on, by the lines of a mount table; the last mount of a point counts."""
    parts = path.resolve().parts
    found, kind = 0, "nothing known"
    for line in mounts.splitlines():
        _, point, this_kind, *_ = line.split(" ")
        point_parts = Path(point.replace("\\040", " ")).parts
        if parts[: len(point_parts)] == point_parts and len(point_parts) >= found:
            found, kind = len(point_parts), this_kind
    return kind


def _taken_bytes(folder: Path) -> int:
    """By the members' own files, some of which may go meanwhile."""
    taken = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            taken += path.stat().st_blocks * 512
    return taken
