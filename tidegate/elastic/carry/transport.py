"""The interface of the transports, which carry out a rank's part of a plan between the flat tensors of two skeletons.

A transport copies the regions that stay on the rank, then exchanges the rest. It writes only the elements of the
targets that the part names, and converts nothing.

Invariants:
- Sources are never written. [test_transports: the_source_is_untouched]
- A copy that leaves its tensor, or whose tensor has another itemsize, is refused before anything is written there.
  [test_shared_memory: a_region_outside_its_tensor_is_refused]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.plan import Part, RegionCopy

StandIns = Mapping[int, tuple[Part, Tensors]]
"""By dead rank: its part and its tensors, which this process can read and sends in its place."""
NO_STAND_INS: StandIns = MappingProxyType({})


class TransferFailed(RuntimeError):
    """Not everything arrived. The targets are incomplete, and the sources are as they were."""


class Transport(Protocol):
    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        """All ranks of the plan call this, each with its own part. It returns when this rank's targets are complete.

        Other ranks may still read this rank's sources then: the sources must not change until all ranks have returned.
        """


def source_region(tensors: Tensors, copy: RegionCopy) -> torch.Tensor:
    """The (rows, cols) of a copy in the sender's tensor."""
    return _region(tensors, copy, copy.source_offset, copy.source_stride)


def target_region(tensors: Tensors, copy: RegionCopy) -> torch.Tensor:
    """The (rows, cols) of a copy in the receiver's tensor."""
    return _region(tensors, copy, copy.target_offset, copy.target_stride)


def copy_regions(copies: Iterable[RegionCopy], sources: Tensors, targets: Tensors) -> None:
    """Copy within this process, on any device."""
    for copy in copies:
        target_region(targets, copy).copy_(source_region(sources, copy))


def tensor_of(tensors: Tensors, copy: RegionCopy, offset: int, stride: int) -> torch.Tensor:
    """The flat tensor that contains a copy's region. Raises TransferFailed where the region is not in it."""
    tensor = tensors.get((copy.name, copy.kind))
    end = offset + (copy.rows - 1) * stride + copy.cols
    if tensor is None or not tensor.is_contiguous() or tensor.itemsize != copy.itemsize or end > tensor.numel():
        found = "none" if tensor is None else f"{tensor.numel()} of {tensor.itemsize} bytes"
        raise TransferFailed(
            f"{copy.name} {copy.kind}: the plan has a region up to element {end} of {copy.itemsize} bytes, and the "
            f"tensor here has {found}: the plan does not belong to these skeletons"
        )
    return tensor.detach()


def _region(tensors: Tensors, copy: RegionCopy, offset: int, stride: int) -> torch.Tensor:
    tensor = tensor_of(tensors, copy, offset, stride)
    return tensor.as_strided((copy.rows, copy.cols), (stride, 1), tensor.storage_offset() + offset)
