"""Chooses where the actor's members on a node keep their state: in shared files in memory, or each in private memory.

The other members of the node read shared files in place. Shared files outlive a member that dies. They are in the job's
folder in host memory. The launcher removes that folder at the end of a run, or at the next start if it could not then.
Each member chooses alone: the members send the state that one of them keeps privately, which is slower but still right.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.elastic.plan.recovery import NUM_SLOTS
from tidegate.elastic.settings import CopyTo
from tidegate.types import Layout, Precision

if TYPE_CHECKING:
    import torch

_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")
_OPTIMIZER_BYTES = {Precision.FP32: 8, Precision.BF16: 12}
"""Bytes per parameter: Adam's moments, and the fp32 main parameter where the weights are not in fp32."""

_GRADIENT_BYTES = 4
"""Bytes per parameter: carried gradients are in fp32."""


@dataclass(frozen=True, slots=True)
class Choice:
    folder: Path | None
    """None: each member keeps its state in private memory."""
    reason: str
    host_memory: Path | None = None
    """For state on a device: the folder for its copies while the actor is suspended. None: private memory."""


def most_bytes(num_parameters: int, *, num_members: int, copies: CopyTo, precision: Precision, carries: bool) -> int:
    """The most bytes that a node's members hold, which is in the middle of a reshard.

    bytes = layouts * parameters * ((1 + copies) * (members * weight_bytes + optimizer_bytes) + gradient_bytes)

    - layouts: 2, the old one and the new one.
    - copies: 0 without copies; NUM_SLOTS for copies on the node; twice that for copies on a peer, since the node also
      holds a peer's copies.
    - weight_bytes: the size of a weight; each member may hold all weights.
    - optimizer_bytes: the optimizer's bytes per parameter; the members hold its state once among them.
    - gradient_bytes: 4 where a reshard carries gradients, which the members hold once among them; else 0.
    """
    all_weights = num_parameters * (num_members * precision.itemsize + _OPTIMIZER_BYTES[precision])
    gradients = num_parameters * _GRADIENT_BYTES if carries else 0
    return 2 * ((1 + _num_copies(copies)) * all_weights + gradients)


def rank_bytes(num_parameters: int, layout: Layout, *, copies: CopyTo, precision: Precision) -> int:
    """The bytes of a rank's tensors in a layout, and of their copies, where the ranks share evenly.

    bytes = (1 + copies) * parameters / (tp * pp) * (weight_bytes + optimizer_bytes / (dp * cp))
    """
    of_shard = num_parameters / (layout.tp * layout.pp)
    of_optimizer = _OPTIMIZER_BYTES[precision] / (layout.dp * layout.cp)
    return math.ceil((1 + _num_copies(copies)) * of_shard * (precision.itemsize + of_optimizer))


def _num_copies(copies: CopyTo) -> int:
    return {CopyTo.NOWHERE: 0, CopyTo.NODE: NUM_SLOTS, CopyTo.PEER: 2 * NUM_SLOTS}[copies]


def choose(folder: Path, *, needed_bytes: int, device: torch.device) -> Choice:
    """Shared memory in `folder`, which is created, or private memory with the reason."""
    found = _in_memory(folder, needed_bytes)
    return found if device.type == "cpu" else Choice(None, f"state is on {device}", host_memory=found.folder)


def _in_memory(folder: Path, needed_bytes: int) -> Choice:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = file_system(folder, _MOUNTS.read_text())
    if kind not in _IN_MEMORY:
        return Choice(None, f"state is not shared: {folder} is on {kind}, not in memory; set runtime.host_memory_root")
    space = os.statvfs(folder)
    room_bytes = space.f_bavail * space.f_frsize + _taken_bytes(folder)
    if room_bytes < needed_bytes:
        return Choice(
            None,
            f"state is not shared: it takes up to {needed_bytes} bytes in {folder}, which has {room_bytes}; make that "
            "file system larger (docker run --shm-size)",
        )
    return Choice(folder, f"state is shared in {folder}: up to {needed_bytes} of {room_bytes} bytes")


def file_system(path: Path, mounts: str) -> str:
    """The kind of file system that holds `path`, from the lines of a mount table. The last mount of a point counts."""
    parts = path.resolve().parts
    found, kind = 0, "nothing known"
    for line in mounts.splitlines():
        _, point, this_kind, *_ = line.split(" ")
        point_parts = Path(point.replace("\\040", " ")).parts
        if parts[: len(point_parts)] == point_parts and len(point_parts) >= found:
            found, kind = len(point_parts), this_kind
    return kind


def _taken_bytes(folder: Path) -> int:
    """Bytes of the members' own files. A file may disappear while this runs."""
    taken = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            taken += path.stat().st_blocks * 512
    return taken
