"""The faults of a simulated iteration and their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simulator.happenings import What
from tidegate.types import GpuId, NodeId


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A GPU is lost, with its engine or the trainer's uncommitted minibatch.

    The GPU is available again after `back_after_s`, unless another fault lasts longer. None: not in this iteration.
    """

    at_s: float
    gpu: GpuId
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeFault:
    """All GPUs and services of a node are lost.

    `back_after_s` is as in `GpuFault`. No other fault of the node begins before it is back.
    """

    at_s: float
    node: NodeId
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFault:
    """An engine's process dies, and its GPUs become free.

    Engines have numbers from 0 in the order of their starts. The policy decides which of them run at that time. If this
    engine does not run, FAULT_MISSED reports it.
    """

    at_s: float
    engine: int


@dataclass(frozen=True, slots=True)
class LateFault:
    """The first happening of this kind from `at_s` on is reported `late_s` later."""

    at_s: float
    what: What
    late_s: float


Fault = GpuFault | NodeFault | EngineFault | LateFault


@dataclass(frozen=True, slots=True, eq=False)
class Outage:
    """GPUs that one fault holds lost. Two outages are never equal: a GPU may have several at once.

    `back_at_s` is None for GPUs that never come back. `node`: all services of this node are lost with its GPUs.
    """

    gpus: tuple[GpuId, ...]
    back_at_s: float | None
    node: NodeId | None = None

    def is_over(self, at_s: float) -> bool:
        return self.back_at_s is not None and self.back_at_s <= at_s


def next_return_s(outages: Iterable[Outage]) -> float | None:
    """When the next of the GPUs is back. None: none comes back."""
    return min((each.back_at_s for each in outages if each.back_at_s is not None), default=None)
