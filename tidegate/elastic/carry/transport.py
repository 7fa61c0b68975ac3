"""What carries out a rank's part of a plan between the flat tensors of two skeletons.

A transport copies what stays on the rank, then exchanges the rest. It changes nothing but the targets' elements that
the part wants, and converts nothing.
Invariants: sources are never written; a copy that leaves its tensor, or whose tensor has another itemsize, is refused
before anything is written there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.plan import Part, RegionCopy

StandIns = Mapping[int, tuple[Part, Tensors]]
"""By a rank that is gone: its part and its tensors, which this process has and sends in its place."""
NO_STAND_INS: StandIns = MappingProxyType({})


class TransferFailed(RuntimeError):
    """Not everything arrived; the targets are incomplete and the sources as they were."""


class Transport(Protocol):
    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        """All ranks of the plan call it, each with its part; returns when this rank's targets are complete.

        Others may still read this rank's sources then: they stay as they are until all have returned.
        """


def source_region(tensors: Tensors, copy: RegionCopy) -> torch.Tensor:
    """The (rows, cols) of a copy where its sender has them."""
    return _region(tensors, copy, copy.source_offset, copy.source_stride)


def target_region(tensors: Tensors, copy: RegionCopy) -> torch.Tensor:
    """The (rows, cols) of a copy where its receiver wants them."""
    return _region(tensors, copy, copy.target_offset, copy.target_stride)


def copy_regions(copies: Iterable[RegionCopy], sources: Tensors, targets: Tensors) -> None:
    """Within this process, on any device."""
    for copy in copies:
        target_region(targets, copy).copy_(source_region(sources, copy))


def tensor_of(tensors: Tensors, copy: RegionCopy, offset: int, stride: int) -> torch.Tensor:
    """The flat tensor in which a copy has a region. Raises TransferFailed where the region is not in it."""
    tensor = tensors.get((copy.name, copy.kind))
    end = offset + (copy.rows - 1) * stride + copy.cols
    if tensor is None or not tensor.is_contiguous() or tensor.itemsize != copy.itemsize or end > tensor.numel():
        found = "none" if tensor is None else f"{tensor.numel()} of {tensor.itemsize} bytes"
        raise TransferFailed(
            f"{copy.name} {copy.kind}: the plan has a region up to element {end} of {copy.itemsize} bytes, the tensor "
            f"here has {found}: the plan is not of these skeletons"
        )
    return tensor.detach()


def _region(tensors: Tensors, copy: RegionCopy, offset: int, stride: int) -> torch.Tensor:
    tensor = tensor_of(tensors, copy, offset, stride)
    return tensor.as_strided((copy.rows, copy.cols), (stride, 1), tensor.storage_offset() + offset)
