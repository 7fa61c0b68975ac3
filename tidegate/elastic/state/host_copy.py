"""A suspended rank's tensors in host memory, while the memory in which it trains is given back.

An arena that is a file in host memory needs no such copy. Every other arena does: on a device, and in a process's
private memory too, so that tests on a CPU take the same path.

- With a path the copy is a file: other processes of the host read it, and it outlives its process.
- Without one it is private memory of the process.
- For a CUDA device the copy is pinned, so that it moves at the bus's speed.

Invariants:
- A copy that is not whole is never offered. [test_suspension: member_that_cannot_keep_its_state]
- A copy takes memory only while the job is suspended. [test_suspension: suspended_job_gives_its_memory_back]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tidegate.elastic.model.memory import Arena, OwnArena, SharedArena
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.recovery import NUM_SLOTS
from tidegate.elastic.state.catalogue import Extent
from tidegate.elastic.state.copies import Packing
from tidegate.elastic.state.stamp import Note

KEPT_SLOT = 2 * NUM_SLOTS
"""The number of this copy among a rank's copies: after its own slots and those that its guardian keeps."""


class HostCopy:
    """`device` is that of the tensors. The file at `path` must not exist; it exists while the copy does."""

    def __init__(self, tensors: Mapping[TensorKey, Extent], path: Path | None, *, device: torch.device) -> None:
        self.packing = Packing(tensors)
        self.path = path
        self._is_pinned = device.type == "cuda"
        self._arena: Arena | None = None
        self._slot = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """The host memory that it takes now."""
        return self._slot.nbytes

    @property
    def tensors(self) -> Tensors:
        assert self._arena is not None, "nothing is kept"
        return self.packing.tensors(self._slot)

    def note(self) -> Note | None:
        """The note of the update that it is of; None where nothing is kept."""
        return None if self._arena is None else self.packing.stamp(self._slot).read()

    def take(self, tensors: Tensors, note: Note) -> None:
        """Copy the tensors, which belong to the note's update. An earlier copy is dropped. Raises ArenaFull."""
        self.release()
        self._arena = OwnArena(torch.device("cpu")) if self.path is None else SharedArena(self.path)
        try:
            self._slot = self._arena.empty(self.packing.num_bytes, torch.uint8)
            if self._is_pinned:
                _pin(self._slot)
            stamp = self.packing.stamp(self._slot)
            # Private memory has any content at first, and a stamp reads its own record.
            stamp.record.zero_()
            with stamp.writing(note), torch.no_grad():
                copied = self.packing.tensors(self._slot)
                torch._foreach_copy_([copied[key] for key in tensors], [tensor.detach() for tensor in tensors.values()])
        except BaseException:  # an interrupt too must not keep the memory
            self.release()
            raise

    def release(self) -> None:
        """Drop the copy; again is no harm."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._is_pinned and self._slot.nbytes:
            _cudart().cudaHostUnregister(self._slot.data_ptr())
        self._slot = torch.empty(0, dtype=torch.uint8)
        arena.release()
        if isinstance(arena, SharedArena):
            arena.unlink()
            arena.close()


def _pin(slot: torch.Tensor) -> None:
    """Where the driver refuses, the copy is as right and only slower."""
    _cudart().cudaHostRegister(slot.data_ptr(), slot.nbytes, 0)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no type for it
